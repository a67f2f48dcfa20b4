"""`experts` in plain PyTorch compared with loops in float64: values, all gradients, frozen parameters."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fusedmoe.kernels import experts
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import (
    Gradients,
    NeedsGrad,
    Weights,
    define_experts,
    experts_backward,
    experts_backward_rows,
    experts_backward_weights,
    experts_forward,
)
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout, build_layout, contiguous_layout
from tests.marks import slowly
from tests.memory import PeakMemory


def make_weights(experts: int, dim: int, hidden: int, num_projections: int, bias: str, dtype: torch.dtype) -> Weights:
    up = (experts, 2, hidden) if num_projections == 2 else (experts, hidden)
    start, columns = (0, dim) if bias == "full" else (dim // 3, dim - dim // 3 - 1)
    return Weights(
        (torch.randn(*up, dim) / dim**0.5).to(dtype),
        (torch.randn(experts, dim, hidden) / hidden**0.5).to(dtype),
        torch.randn(*up).to(dtype) if bias else None,
        torch.randn(experts, columns).to(dtype) if bias else None,
        start if bias else 0,
    )


def compute(
    x_SM: torch.Tensor, dy_SM: torch.Tensor, layout: Layout, weight_N: torch.Tensor | None, weights: Weights, name: str
) -> dict[str, torch.Tensor | None]:
    y_SM, h_NH = experts_forward(x_SM, layout, weight_N, weights, ACTIVATIONS[name])
    grads = experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, ACTIVATIONS[name])
    halves = backward_in_halves(dy_SM, x_SM, h_NH, layout, weight_N, weights, name)
    for one, other in zip(vars(grads).values(), vars(halves).values(), strict=True):
        assert other is one is None or torch.equal(one, other)  # the same products in the same order
    return {"y": y_SM, **{f"d{name}": value for name, value in vars(grads).items()}}


def backward_in_halves(
    dy_SM: torch.Tensor,
    x_SM: torch.Tensor,
    h_NH: torch.Tensor,
    layout: Layout,
    weight_N: torch.Tensor | None,
    weights: Weights,
    name: str,
    into: Gradients | None = None,
) -> Gradients:
    dx_SM, dweight_N, left = experts_backward_rows(dy_SM, h_NH, layout, weight_N, weights, ACTIVATIONS[name])
    grads = experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights, into)
    return replace(grads, x_SM=dx_SM, weight_N=dweight_N)


def define(
    x_SM: torch.Tensor, dy_SM: torch.Tensor, layout: Layout, weight_N: torch.Tensor | None, weights: Weights, name: str
) -> dict[str, torch.Tensor | None]:
    """Compute the same in float64, by autograd through the definition."""

    def leaf(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_()

    x, s = leaf(x_SM), leaf(weight_N)
    assert x is not None
    exact = Weights(*(leaf(w) for w in (weights.w1, weights.w2, weights.b1, weights.b2)), weights.b2_start)  # type: ignore[arg-type]
    y = define_experts(x, layout, s, exact, name)
    if y.requires_grad:  # false if no row was routed
        (y * dy_SM.double()).sum().backward()
    leaves = {"x_SM": x, "weight_N": s, "w1": exact.w1, "w2": exact.w2, "b1": exact.b1, "b2": exact.b2}
    grads = {
        f"d{key}": None if value is None else (torch.zeros_like(value) if value.grad is None else value.grad)
        for key, value in leaves.items()
    }
    return {"y": y, **grads}


def compare(got: dict[str, torch.Tensor | None], exact: dict[str, torch.Tensor | None], tolerance: float) -> None:
    for name, expected in exact.items():
        value = got[name]
        if expected is None:
            assert value is None, name
            continue
        assert value is not None and value.shape == expected.shape, name
        error = (value.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert not error.isnan() and error <= tolerance, (name, float(error))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", ["", "full", "slice"])
@pytest.mark.parametrize("weighted", [False, True])
def test_experts_equal_loop_for_every_activation(name: str, bias: str, weighted: bool) -> None:
    layout = build_layout(torch.stack([torch.randperm(4)[:2] for _ in range(21)]), 4, capacity=9)
    x_SM, dy_SM = torch.randn(21, 10).double(), torch.randn(21, 10).double()
    weight_N = torch.rand(layout.rows).double() if weighted else None
    weights = make_weights(4, 10, 6, ACTIVATIONS[name].num_projections, bias, torch.float64)
    case = (x_SM, dy_SM, layout, weight_N, weights, name)
    compare(compute(*case), define(*case), 1e-13)


@pytest.mark.parametrize(
    "expert_SK",
    [
        torch.empty(0, 2, dtype=torch.long),
        torch.tensor([[3]]),
        torch.full((9, 1), 5),
        torch.tensor([[0, 6], [6, 0], [0, 6]]),
        torch.full((4, 2), -1),
        torch.tensor([[1, -1], [-1, -1], [6, 1]]),
    ],
    ids=["no_token", "one_token", "single_expert", "empty_experts", "no_routed_token", "empty_slots"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_experts_with_irregular_routings(expert_SK: torch.Tensor, weighted: bool) -> None:
    layout = build_layout(expert_SK, 7)
    x_SM, dy_SM = torch.randn(len(expert_SK), 5).double(), torch.randn(len(expert_SK), 5).double()
    weight_N = torch.rand(layout.rows).double() if weighted else None
    case = (x_SM, dy_SM, layout, weight_N, make_weights(7, 5, 3, 2, "full", torch.float64), "swiglu")
    compare(compute(*case), define(*case), 1e-13)


def test_contiguous_rows_equal_loop() -> None:
    layout = contiguous_layout(torch.tensor([2, 0, 5]), 7)
    weights = make_weights(3, 5, 4, 1, "full", torch.float64)
    case = (torch.randn(7, 5).double(), torch.randn(7, 5).double(), layout, torch.rand(7).double(), weights, "gelu")
    compare(compute(*case), define(*case), 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float32)], ids=str)
def test_several_row_blocks_in_low_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows on one expert than a block holds, so weight gradients are sums over blocks.
    expert_SK = torch.stack([torch.randperm(3)[:2] for _ in range(1000)])
    layout = build_layout(expert_SK, 3)
    monkeypatch.setattr(experts, "_BLOCK_ROWS", 300)
    assert max(layout.counts) > 2 * experts._BLOCK_ROWS
    x_SM = torch.randn(16, 1000).to(dtype).t()
    dy_SM = torch.randn(2000, 16).to(dtype)[::2]
    weight_N = torch.rand(layout.rows)
    weights = make_weights(3, 16, 24, 2, "full", dtype)
    case = (x_SM, dy_SM, layout, weight_N, weights, "swiglu")
    compare(compute(*case), define(*case), 2e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "bias", "weighted"), [("swiglu", "slice", True), ("gelu", "full", False), ("relu", "", True)]
)
def test_requested_gradients_are_bitwise_equal_to_all(
    name: str, bias: str, weighted: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_BLOCK_ROWS", 4)
    layout = build_layout(torch.stack([torch.randperm(4)[:2] for _ in range(14)]), 5)
    weights = make_weights(5, 10, 6, ACTIVATIONS[name].num_projections, bias, dtype)
    x_SM, dy_SM = torch.randn(28, 10).to(dtype)[::2], torch.randn(10, 14).to(dtype).t()
    weight_N, activation = torch.rand(layout.rows) if weighted else None, ACTIVATIONS[name]
    _, h_NH = experts_forward(x_SM, layout, weight_N, weights, activation)
    whole = experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    parameters = [key for key in ("w1", "w2", "b1", "b2") if getattr(weights, key) is not None]
    totals = replace(whole, **{key: torch.rand_like(getattr(whole, key)) for key in parameters})
    for asked in itertools.product([False, True], repeat=6):
        wanted = NeedsGrad(*asked)
        # Unread tensors may be absent.
        x, h = x_SM if wanted.w1 else None, h_NH if wanted.h_NH else None
        grads = experts_backward(dy_SM, x, h, layout, weight_N, weights, activation, needs_grad=wanted)
        given = (layout, weight_N, weights)
        dx_SM, dweight_N, left = experts_backward_rows(dy_SM, h, *given, activation, wanted)
        later = experts_backward_weights(dy_SM, x, left, *given, None, wanted)
        into = replace(totals, **{key: getattr(totals, key).clone() for key in parameters})
        added = experts_backward_weights(dy_SM, x, left, *given, into, wanted)
        for key, is_wanted in zip(NeedsGrad._fields, wanted, strict=True):
            one, right = getattr(grads, key), getattr(whole, key)
            other = {"x_SM": dx_SM, "weight_N": dweight_N}.get(key, getattr(later, key))
            if not is_wanted or right is None:
                assert one is None and other is None, key
                continue
            assert torch.equal(one, right) and torch.equal(other, right), key
            if key in parameters:
                # Half precision is summed in float32.
                total = at_least_float32(getattr(totals, key))
                torch.testing.assert_close(getattr(added, key), total + right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", ["", "full"])
def test_weight_gradients_accumulate_into_addend(bias: str, dtype: torch.dtype) -> None:
    layout = build_layout(torch.tensor([[0, 2], [2, 0], [0, -1]]), 4)
    weights = make_weights(4, 10, 6, 2, bias, dtype)
    x_SM, dy_SM = torch.randn(3, 10).to(dtype), torch.randn(3, 10).to(dtype)
    weight_N, swiglu = torch.rand(layout.rows).to(dtype), ACTIVATIONS["swiglu"]
    _, h_NH = experts_forward(x_SM, layout, weight_N, weights, swiglu)
    alone = experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, swiglu)
    total = torch.promote_types(dtype, torch.float32)
    given = [None if g is None else torch.randn(g.shape).to(total) for g in (alone.w1, alone.w2, alone.b1, alone.b2)]
    into = Gradients(x_SM, None, *(None if g is None else g.clone() for g in given))  # type: ignore[arg-type]
    added = experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, swiglu, into)
    again = Gradients(x_SM, None, *(None if g is None else g.clone() for g in given))  # type: ignore[arg-type]
    halves = backward_in_halves(dy_SM, x_SM, h_NH, layout, weight_N, weights, "swiglu", again)
    assert torch.equal(halves.w1, added.w1) and torch.equal(halves.w2, added.w2) and halves.w1 is again.w1
    assert torch.equal(added.x_SM, alone.x_SM) and added.w1 is into.w1 and added.w2 is into.w2
    for name, before in zip(("w1", "w2", "b1", "b2"), given, strict=True):
        own, sum_ = getattr(alone, name), getattr(added, name)
        if before is None:
            assert own is None and sum_ is None
        else:
            torch.testing.assert_close(sum_, before + own.to(total), rtol=1e-12, atol=1e-12 if dtype == total else 1e-6)


def test_frozen_experts_allocate_no_expert_sized_tensor() -> None:
    # Few tokens relative to the experts' size: only a parameter gradient is as large as the experts.
    layout = build_layout(torch.tensor([[0, 3], [5, 0], [7, 3]]), 8)
    weights = make_weights(8, 24, 32, 2, "full", torch.float32)
    x_SM, dy_SM, weight_N = torch.randn(3, 24), torch.randn(3, 24), torch.rand(layout.rows)
    swiglu, least = ACTIVATIONS["swiglu"], min(weights.w1[0].nbytes, weights.w2[0].nbytes)
    _, h_NH = experts_forward(x_SM, layout, weight_N, weights, swiglu)
    for wanted, expected in ((NeedsGrad(True, True, False, False, False, False), False), (NeedsGrad(), True)):
        with PeakMemory() as memory:
            experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, swiglu, needs_grad=wanted)
        assert (memory.largest > 4 * least) == expected
