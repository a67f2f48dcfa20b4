"""Low-rank adapters of frozen experts, compared in float64 with experts of the summed matrices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from fusedmoe.autograd.low_rank import low_rank_experts, low_rank_linear
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import experts as blocks
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout, build_layout, contiguous_layout
from fusedmoe.kernels.low_rank import (
    Adapters,
    LowRank,
    StoredWeights,
    define_low_rank_experts,
    low_rank_backward,
    low_rank_forward,
)
from tests.kernels.routings import choose
from tests.memory import PeakMemory
from tests.poison import poisoned

E, M, H = 5, 12, 7
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def adapter(experts: int, out: int, width: int, rank: int, dtype: torch.dtype, scale: float) -> LowRank:
    a, b = torch.randn(experts, rank, width) / width**0.5, torch.randn(experts, rank, out).mT / rank**0.5
    return LowRank(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), scale)


def network(activation: str, bias: bool, which: str, dtype: torch.dtype) -> tuple[Weights, Adapters]:
    """Frozen experts with adapters on the products named in `which`; the B factors have unusual strides."""
    halves = (2,) if ACTIVATIONS[activation].gated else ()
    w1 = (torch.randn(E, *halves, H, M) / M**0.5).to(dtype)
    w2 = (torch.randn(E, M, H) / H**0.5).to(dtype)
    b1, b2 = (torch.randn(E, *halves, H).to(dtype), torch.randn(E, M - 3).to(dtype)) if bias else (None, None)
    up = adapter(E, len(halves) * H or H, M, 3, dtype, 0.7) if "up" in which else None
    if halves and up is not None:
        up = adapter(E, 2 * H, M, 3, dtype, 0.7)
    down = adapter(E, M, H, 4, dtype, 1.3) if "down" in which else None
    return Weights(w1, w2, b1, b2, 2 if bias else 0), Adapters(up, down)


def double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().double().requires_grad_(value.requires_grad)
    if isinstance(value, LowRank):
        return LowRank(double(value.a_ErI), double(value.b_EOr), value.scale)
    return value


def compare(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, adapters: Adapters, name: str
) -> None:
    """Compare results and all gradients with the definition in float64."""
    exact = Weights(*(double(getattr(weights, field.name)) for field in fields(weights)))
    exact_x, exact_w, pair = double(x_SM), double(weight_N), Adapters(*map(double, adapters))
    with poisoned():
        y_SM = low_rank_experts(x_SM, layout, weight_N, weights, adapters, name)
        wanted = define_low_rank_experts(exact_x, layout, exact_w, exact, pair, name)
        dy_SM = torch.randn_like(y_SM)
        given = [x_SM, weight_N, *(f for one in adapters if one for f in one[:2])]
        leaves = [exact_x, exact_w, *(f for one in pair if one for f in one[:2])]
        keep = [n for n, leaf in enumerate(given) if leaf is not None and leaf.requires_grad]
        grads = torch.autograd.grad(y_SM, [given[n] for n in keep], dy_SM)
        if not wanted.requires_grad:  # no row was routed
            assert all(not grad.any() for grad in grads) and not y_SM.any()
            return
        exact_grads = torch.autograd.grad(wanted, [leaves[n] for n in keep], dy_SM.double(), allow_unused=True)
    for value, right in zip((y_SM, *grads), (wanted, *exact_grads), strict=True):
        right = torch.zeros_like(value).double() if right is None else right
        scale = right.detach().abs().max().item() if right.numel() else 1.0
        torch.testing.assert_close(value.double(), right, rtol=0, atol=TOLERANCE[x_SM.dtype] * scale)


def routed(tokens: int, empty: float = 0.2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Layout, Tensor]:
    """Return non-contiguous tokens, with an expert that nobody chose, and the rows' weights."""
    expert_SK = choose(tokens, 3, E, empty)
    expert_SK[expert_SK == 1] = -1
    layout = build_layout(expert_SK, E)
    x_SM = torch.randn(M, tokens).to(dtype).t().requires_grad_()
    return x_SM, layout, torch.rand(layout.rows, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("which", ["up", "down", "up and down"])
def test_low_rank_experts_equal_summed_matrices(activation: str, bias: bool, which: str) -> None:
    compare(*routed(23), *network(activation, bias, which, torch.float64), activation)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_low_rank_experts_in_every_dtype_and_size(dtype: torch.dtype, tokens: int) -> None:
    compare(*routed(tokens, dtype=dtype), *network("swiglu", True, "up and down", dtype), "swiglu")


def test_low_rank_experts_without_routed_rows() -> None:
    compare(*routed(6, empty=1.0), *network("swiglu", False, "up and down", torch.float64), "swiglu")


def test_low_rank_experts_of_contiguous_rows() -> None:
    layout = contiguous_layout(torch.tensor([3, 0, 4, 0, 6]), 13)
    x_SM = torch.randn(13, M, dtype=torch.float64, requires_grad=True)
    compare(x_SM, layout, None, *network("geglu", True, "up and down", torch.float64), "geglu")


def test_low_rank_gradients_accumulate_over_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose rows fill several blocks accumulate gradients; activations are computed slice by slice."""
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 3)
    monkeypatch.setattr(blocks, "_SLICE_BYTES", 4 * H * 8)
    compare(*routed(50), *network("swiglu", True, "up and down", torch.float64), "swiglu")


def test_frozen_factors_get_no_gradient() -> None:
    """Frozen factors or tokens get no gradient; the remaining gradients keep their bits."""
    x_SM, layout, weight_N = routed(19)
    weights, adapters = network("swiglu", False, "up and down", torch.float64)
    assert adapters.up is not None and adapters.down is not None
    leaves = [x_SM, weight_N, *adapters.up[:2], *adapters.down[:2]]
    dy_SM = torch.randn(19, M, dtype=torch.float64)
    every = torch.autograd.grad(low_rank_experts(x_SM, layout, weight_N, weights, adapters, "swiglu"), leaves, dy_SM)
    for frozen in ((0,), (0, 1), (2, 3), (4, 5), (2, 4), (2, 3, 4, 5)):
        given = [leaf.detach().requires_grad_(n not in frozen) for n, leaf in enumerate(leaves)]
        pair = Adapters(LowRank(given[2], given[3], 0.7), LowRank(given[4], given[5], 1.3))
        low_rank_experts(given[0], layout, given[1], weights, pair, "swiglu").backward(dy_SM)
        for n, leaf in enumerate(given):
            assert leaf.grad is None if n in frozen else torch.equal(leaf.grad, every[n]), (frozen, n)


def test_low_rank_peak_memory_is_independent_of_expert_count() -> None:
    """Peak memory of both passes hardly grows with the number of experts that share the same rows."""
    peaks = []
    for experts in (4, 64):
        weights = Weights(torch.randn(experts, 2, 64, 96), torch.randn(experts, 96, 64))
        adapters = Adapters(*(adapter(experts, o, i, 1, torch.float32, 1.0) for o, i in ((128, 96), (96, 64))))
        adapters = Adapters(*(one and LowRank(one.a_ErI.detach(), one.b_EOr.detach()) for one in adapters))
        layout = build_layout(torch.arange(64).view(64, 1) % experts, experts)
        x_SM, weight_N = torch.randn(64, 96), torch.rand(64)
        with PeakMemory() as memory:
            y_SM, hidden = low_rank_forward(x_SM, layout, weight_N, weights, adapters, ACTIVATIONS["swiglu"])
            given = (y_SM, x_SM, hidden, layout, weight_N, weights, adapters, ACTIVATIONS["swiglu"], True)
            grads = low_rank_backward(*given)
        peaks.append(memory.peak)
        del grads
    factors, matrices = 60 * (128 + 96 + 96 + 64) * 4, 60 * 3 * 96 * 64 * 4
    assert peaks[1] - peaks[0] < 2 * factors < matrices / 10


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 17])
def test_low_rank_linear_equals_summed_matrix(transposed: bool, bias: bool, tokens: int) -> None:
    layout = build_layout(choose(tokens, 2, E, 0.3), E)
    rows_NK = torch.randn(layout.rows, M, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(E, H, M, dtype=torch.float64)
    bias_EO = torch.randn(E, H, dtype=torch.float64) if bias else None
    low = adapter(E, H, M, 3, torch.float64, 0.6)
    w = weight if transposed else weight.mT.contiguous()
    out_NO = low_rank_linear(rows_NK, layout, w, low, bias_EO, transposed=transposed)
    matrices = weight + low.delta_EOI()
    rows = rows_NK.split(layout.counts)
    wanted = torch.cat(
        [
            x @ m.t() + (0 if bias_EO is None else b)
            for x, m, b in zip(rows, matrices, torch.zeros(E, H) if bias_EO is None else bias_EO, strict=True)
        ]
    )
    leaves, dout_NO = [rows_NK, *low[:2]], torch.randn_like(out_NO)
    torch.testing.assert_close(out_NO, wanted, rtol=0, atol=1e-12)
    for grad, right in zip(
        torch.autograd.grad(out_NO, leaves, dout_NO), torch.autograd.grad(wanted, leaves, dout_NO), strict=True
    ):
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-12)


class LazyMatrices:
    """Matrices in multiples of 1/16, each built on access; `made` counts the live matrices."""

    def __init__(self, matrices: Tensor) -> None:
        self.sixteenths, self.shape = (matrices * 16).round().to(torch.int8), matrices.shape
        self.live: WeakSet[Any] = WeakSet()
        self.most = 0

    def __getitem__(self, expert: int) -> Tensor:
        matrix = self.sixteenths[expert].double() / 16
        self.live.add(matrix)
        self.most = max(self.most, len(self.live))
        return matrix

    def whole(self) -> Tensor:
        return self.sixteenths.double() / 16


@pytest.mark.parametrize("which", ["", "up", "up and down"])
@pytest.mark.parametrize("tokens", [0, 1, 31])
def test_lazily_built_weights_are_bitwise_equal(which: str, tokens: int) -> None:
    """Weights built per expert give the same bits as tensors; at most one or two are alive at a time."""
    weights, adapters = network("swiglu", True, which, torch.float64)
    up, down = LazyMatrices(weights.w1.flatten(1, -2)), LazyMatrices(weights.w2)
    b1, b2 = torch.randn(E, 2, H).double(), torch.randn(E, M).double()
    plain, stored = (
        Weights(up.whole().view(E, 2, H, M), down.whole(), b1, b2),
        StoredWeights(up, down, b1.flatten(1), b2),
    )
    x_SM, layout, weight_N = routed(tokens)
    leaves = [x_SM, weight_N, *(factor for one in adapters if one for factor in one[:2])]
    found = []
    for each in (plain, stored):
        y_SM = low_rank_experts(x_SM, layout, weight_N, each, adapters, "swiglu")
        found.append([y_SM, *torch.autograd.grad(y_SM, leaves, torch.ones_like(y_SM))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert max(up.most, down.most) <= 2 and bool(up.most) == bool(down.most) == bool(layout.kept)
    with pytest.raises(ConfigError, match="matrices must be"):
        low_rank_experts(x_SM, layout, weight_N, StoredWeights(down, up), adapters, "swiglu")


def test_low_rank_rejects_trainable_or_mismatched_weights() -> None:
    x_SM, layout, weight_N = routed(5)
    weights, adapters = network("swiglu", False, "up and down", torch.float64)
    assert adapters.up is not None and adapters.down is not None
    with pytest.raises(ConfigError, match="freeze them"):
        trained = replace(weights, w2=weights.w2.clone().requires_grad_())
        low_rank_experts(x_SM, layout, weight_N, trained, adapters, "swiglu")
    for wrong in (adapters.down, LowRank(adapters.up.a_ErI[:, :2], adapters.up.b_EOr), adapters.up.to(torch.float32)):
        with pytest.raises(ConfigError, match="the up adapter"):
            low_rank_experts(x_SM, layout, weight_N, weights, Adapters(wrong, None), "swiglu")
    rows_NK = torch.randn(layout.rows, M, dtype=torch.float64)
    low = adapter(E, H, M, 3, torch.float64, 1.0)
    for weight, name in ((torch.randn(E, H, M + 1), "weight"), (torch.randn(E, M, H).double(), "weight")):
        with pytest.raises(ConfigError, match=name):
            low_rank_linear(rows_NK, layout, weight, low)
    with pytest.raises(ConfigError, match="the adapter must be"):
        low_rank_linear(rows_NK, layout, torch.randn(E, H + 1, M).double(), low)
