"""The grouped products compared with float64, through the experts' operation and separately."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import ALL, Gradients, NeedsGrad, Weights, experts_backward, experts_forward
from fusedmoe.kernels.layout import Layout, build_layout, contiguous_layout, define_layout
from fusedmoe.kernels.triton import experts as triton_experts
from tests.kernels.routings import choose
from tests.marks import interpreted_slowly

NoSync = Callable[[], AbstractContextManager[None]]


def make_weights(experts: int, dim: int, hidden: int, name: str, bias: str, device: torch.device) -> Weights:
    up = (experts, 2, hidden) if ACTIVATIONS[name].gated else (experts, hidden)
    start, columns = (0, dim) if bias == "full" else (dim // 3, dim - dim // 3 - 1)
    weights = (
        torch.randn(*up, dim, device=device) / dim**0.5,
        torch.randn(experts, dim, hidden, device=device) / hidden**0.5,
        torch.randn(*up, device=device) if bias else None,
        torch.randn(experts, columns, device=device) if bias else None,
    )
    return Weights(*weights, start if bias else 0)


def double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().cpu()


def check(
    x_SM: Tensor, dy_SM: Tensor, expert_SK: Tensor, capacity: int | None, weights: Weights, name: str, no_sync: NoSync
) -> None:
    """Compare outputs and all gradients, with router weights, with plain torch in float64."""
    activation, experts = ACTIVATIONS[name], weights.w1.shape[0]
    layout = build_layout(expert_SK, experts, capacity)
    exact = define_layout(expert_SK, experts, capacity)
    weight_N = torch.rand(layout.rows, device=x_SM.device)
    with no_sync():
        y_SM, h = experts_forward(x_SM, layout, weight_N, weights, activation)
        grads = experts_backward(dy_SM, x_SM, h, layout, weight_N, weights, activation)
    whole = Weights(*(double(w) for w in (weights.w1, weights.w2, weights.b1, weights.b2)), weights.b2_start)  # type: ignore[arg-type]
    case = (double(x_SM), exact, double(weight_N[: exact.rows]), whole, activation)
    right_y, right_h = experts_forward(*case)  # type: ignore[arg-type]
    right = experts_backward(double(dy_SM), case[0], right_h, *case[1:])  # type: ignore[arg-type]
    found: dict[str, tuple[Tensor | None, Tensor | None]] = {"y": (y_SM, right_y), "h": (h[: exact.rows], right_h)}
    for key, value in vars(grads).items():
        value = value[: exact.rows] if key == "weight_N" else value
        found[key] = (value, getattr(right, key))
    for key, (got, expected) in found.items():
        assert (got is None) == (expected is None), key
        if got is None or expected is None:
            continue
        assert got.shape == expected.shape, key
        size = expected.norm().clamp(min=1e-20)
        if key == "weight_N":
            # Products of two rows, whose few terms may cancel: rounding is measured relative to their size without
            # cancellation.
            size = size.clamp(min=float(dy_SM.double().norm() * right_y.norm()) / x_SM.numel() ** 0.5)
        error = float((got.cpu().double() - expected).norm() / size)
        assert error <= 1e-5, (key, error)  # false for NaN, too


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "dim", "hidden", "capacity", "name", "bias"),
    [
        (37, 3, 7, 100, 44, 9, "swiglu", "full"),
        *interpreted_slowly(
            (37, 2, 7, 64, 96, None, "swiglu", ""),
            (61, 2, 4, 36, 30, None, "gelu", "slice"),
            (33, 1, 3, 128, 64, None, "relu", ""),
            (12, 8, 20, 32, 16, None, "geglu", ""),
            (30, 2, 3, 70, 150, 16, "swiglu", ""),
        ),
        pytest.param(40, 8, 64, 32, 16, None, "geglu", "", marks=pytest.mark.slow),
        pytest.param(12, 10, 128, 32, 32, None, "gelu_tanh", "full", marks=pytest.mark.slow),
        (9, 3, 17, 32, 32, None, "gelu_tanh", "full"),
        (1, 1, 1, 100, 60, None, "silu", "full"),
        pytest.param(90, 2, 5, 70, 600, 20, "swiglu", "", marks=pytest.mark.slow),
    ],
)
def test_grouped_experts_equal_float64(
    tokens: int,
    slots: int,
    experts: int,
    dim: int,
    hidden: int,
    capacity: int | None,
    name: str,
    bias: str,
    device: torch.device,
    no_sync: NoSync,
) -> None:
    weights = make_weights(experts, dim, hidden, name, bias, device)
    x_SM, dy_SM = torch.randn(tokens, dim, device=device), torch.randn(tokens, dim, device=device)
    check(x_SM, dy_SM, choose(tokens, slots, experts, 0.0).to(device), capacity, weights, name, no_sync)


@pytest.mark.parametrize(
    "expert_SK",
    [
        torch.full((70, 1), 5),
        torch.tensor([[0, 6], [6, 0], [0, 6]]),
        torch.full((4, 2), -1),
        torch.tensor([[1, -1], [-1, -1], [6, 1]]),
    ],
    ids=["single_expert", "empty_experts", "no_routed_token", "empty_slots"],
)
def test_grouped_experts_with_irregular_routings(expert_SK: Tensor, device: torch.device, no_sync: NoSync) -> None:
    weights = make_weights(7, 32, 24, "swiglu", "full", device)
    # Columns of wider tensors: neither side is contiguous.
    x_SM = torch.randn(len(expert_SK), 64, device=device)[:, ::2]
    dy_SM = torch.randn(32, len(expert_SK), device=device).t()
    check(x_SM, dy_SM, expert_SK.to(device), None, weights, "swiglu", no_sync)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("gathered", [True, False])
def test_zero_capacity_or_no_rows_gives_zeros(
    name: str, gathered: bool, device: torch.device, no_sync: NoSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every expert's capacity is 0, or this rank received no rows: all results are zeros."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *sizes, **how: empty(self, *sizes, **how).fill_(77))
    for dim, hidden in ((64, 32), (36, 30)):  # with and without descriptors; zero rows have no descriptors
        weights = make_weights(7, dim, hidden, name, "full", device)
        x_SM, dy_SM = torch.randn(9, dim, device=device), torch.randn(9, dim, device=device)
        if gathered:
            check(x_SM, dy_SM, choose(9, 2, 7, 0.0).to(device), 0, weights, name, no_sync)
            continue
        layout, activation = contiguous_layout(torch.zeros(7, device=device).long(), 0), ACTIVATIONS[name]
        with no_sync():
            y_SM, h = triton_experts.experts_forward(x_SM[:0], layout, None, weights, activation)
            given = (layout, None, weights)
            dx_SM, _, left = triton_experts.experts_backward_rows(dy_SM[:0], h, *given, activation, ALL)
            grads = triton_experts.experts_backward_weights(dy_SM[:0], x_SM[:0], left, *given, None, ALL)
            into = Gradients(None, None, weights.w1, weights.w2, weights.b1, weights.b2)
            added = triton_experts.experts_backward_weights(dy_SM[:0], x_SM[:0], left, *given, into, ALL)
        assert y_SM.shape == dx_SM.shape == (0, dim)
        for gradient, of in ((grads.w1, weights.w1), (grads.w2, weights.w2), (grads.b1, weights.b1)):
            assert gradient is not None and of is not None and gradient.shape == of.shape and not gradient.any()
        assert all(torch.equal(one, other) for one, other in zip(added.parameters, into.parameters, strict=True))


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16], ids=["in_place", "widened"])
@pytest.mark.parametrize(("dim", "hidden"), [(64, 32), *interpreted_slowly((36, 30))])
def test_weight_gradients_accumulate_into_addend(
    dim: int, hidden: int, total: torch.dtype, device: torch.device, no_sync: NoSync
) -> None:
    """Sums are in float32 for any dtype and strides of the addend; experts without rows keep the addend."""
    swiglu, experts = ACTIVATIONS["swiglu"], 7
    expert_SK = torch.tensor([[0, 6], [6, 0], [0, 6], [2, -1]], device=device).repeat(9, 1)
    layout, exact = build_layout(expert_SK, experts, None), define_layout(expert_SK, experts, None)
    weights, weight_N = make_weights(experts, dim, hidden, "swiglu", "slice", device), torch.rand(layout.rows)
    weight_N = weight_N.to(device)
    x_SM, dy_SM = torch.randn(36, dim, device=device), torch.randn(36, dim, device=device)
    given = [torch.randn_like(one).to(total) for one in (weights.w1, weights.w2, weights.b1, weights.b2)]  # type: ignore[arg-type]
    given[1] = given[1].mT.contiguous().mT
    before = [one.double().cpu() for one in given]
    _, h = experts_forward(x_SM, layout, weight_N, weights, swiglu)
    into, only_w1 = Gradients(None, None, *given), NeedsGrad(False, False, True, False, False, False)
    with no_sync():
        added = experts_backward(dy_SM, x_SM, h, layout, weight_N, weights, swiglu, into)
    whole = Weights(*(double(w) for w in (weights.w1, weights.w2, weights.b1, weights.b2)), weights.b2_start)  # type: ignore[arg-type]
    case = (double(x_SM), exact, double(weight_N[: exact.rows]), whole, swiglu)
    _, right_h = experts_forward(*case)  # type: ignore[arg-type]
    right = experts_backward(double(dy_SM), case[0], right_h, *case[1:])  # type: ignore[arg-type]
    for found, old, own in zip(added.parameters, before, right.parameters, strict=True):
        assert found is not None and own is not None and found.dtype == torch.float32
        torch.testing.assert_close(double(found), old + own, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[1].double().cpu(), old[1]), "an expert without rows"
    assert (added.w1.data_ptr() == given[0].data_ptr()) == (total == torch.float32)  # type: ignore[union-attr]
    # An unneeded gradient has no sum, either.
    alone = replace(into, w2=None, b1=None, b2=None)
    one = experts_backward(dy_SM, x_SM, h, layout, weight_N, weights, swiglu, alone, only_w1)
    assert one.w1 is not None and one.parameters[1:] == (None, None, None)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_requested_gradients_equal_full_backward(name: str, device: torch.device, no_sync: NoSync) -> None:
    layout, activation = build_layout(choose(11, 2, 5, 0.0).to(device), 5, 6), ACTIVATIONS[name]
    weights, weight_N = make_weights(5, 32, 24, name, "slice", device), torch.rand(layout.rows, device=device)
    x_SM, dy_SM = torch.randn(11, 32, device=device), torch.randn(11, 32, device=device)
    _, h = experts_forward(x_SM, layout, weight_N, weights, activation)
    whole = experts_backward(dy_SM, x_SM, h, layout, weight_N, weights, activation)
    for wanted in ("x_SM weight_N", "w1", "w2", "weight_N b2", "x_SM b1", "w1 w2 b1", "b2"):
        asked = NeedsGrad(*(one in wanted.split() for one in NeedsGrad._fields))
        given = (x_SM if asked.w1 else None, h if asked.h_NH else None, layout, weight_N, weights, activation)
        with no_sync():
            grads = experts_backward(dy_SM, *given, needs_grad=asked)
        for key, value in vars(grads).items():
            assert (value is not None) == getattr(asked, key), (wanted, key)
            rows = int(layout.counts_E.sum()) if key == "weight_N" else None  # padding's gradient is ignored
            if value is not None:
                # Compilers contract products and sums differently if less is stored: on a GPU the last bits may differ.
                exact = {"rtol": 0.0, "atol": 0.0} if device.type == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(value[:rows], getattr(whole, key)[:rows], msg=f"{wanted}, {key}", **exact)


def test_contiguous_rows_without_router_weights(device: torch.device) -> None:
    layout = contiguous_layout(torch.tensor([2, 0, 45], device=device), 47)
    weights = make_weights(3, 48, 32, "gelu", "full", device)
    x_SM, dy_SM = torch.randn(47, 48, device=device), torch.randn(47, 48, device=device)
    y_SM, h = experts_forward(x_SM, layout, None, weights, ACTIVATIONS["gelu"])
    grads = experts_backward(dy_SM, x_SM, h, layout, None, weights, ACTIVATIONS["gelu"])
    whole = Weights(*(double(w) for w in (weights.w1, weights.w2, weights.b1, weights.b2)), weights.b2_start)  # type: ignore[arg-type]
    case = (double(x_SM), contiguous_layout(torch.tensor([2, 0, 45]), 47), None, whole, ACTIVATIONS["gelu"])
    right_y, right_h = experts_forward(*case)  # type: ignore[arg-type]
    right = experts_backward(double(dy_SM), case[0], right_h, *case[1:])  # type: ignore[arg-type]
    assert grads.weight_N is None
    of_inputs = [(getattr(grads, name), getattr(right, name)) for name in ("x_SM", "w1", "w2", "b1", "b2")]
    for got, expected in [(y_SM, right_y), *of_inputs]:
        torch.testing.assert_close(double(got), expected, rtol=1e-4, atol=1e-4)


def test_slack_is_never_read(device: torch.device) -> None:
    """A layout with arrays longer than its rows, as on CUDA, gives the same bits as an exact one."""
    exact = build_layout(choose(20, 2, 4, 0.0).to(device), 4)
    assert exact.source_N is not None
    pad = torch.zeros(9, dtype=torch.long, device=device)
    loose = Layout(
        exact.counts_E, exact.offsets_E1, torch.cat([exact.source_N, pad]), torch.cat([exact.pair_N, pad]), exact.row_SK
    )
    weights = make_weights(4, 32, 16, "swiglu", "", device)
    x_SM, dy_SM = torch.randn(20, 32, device=device), torch.randn(20, 32, device=device)
    weight_N = torch.rand(exact.rows, device=device)
    loose_weight_N = torch.cat([weight_N, torch.full((9,), float("nan"), device=device)])
    results = []
    for layout, s in ((exact, weight_N), (loose, loose_weight_N)):
        y_SM, h = experts_forward(x_SM, layout, s, weights, ACTIVATIONS["swiglu"])
        grads = experts_backward(dy_SM, x_SM, h, layout, s, weights, ACTIVATIONS["swiglu"])
        results.append([y_SM, grads.x_SM, grads.w1, grads.w2])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
