"""Low-rank adapters of frozen experts with grouped kernels and padding, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe.autograd.low_rank import low_rank_experts, low_rank_linear
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.low_rank import Adapters, LowRank, define_low_rank_experts
from tests.kernels.device.test_padding import padded, rows_of_nan_behind

E, M, H = 4, 24, 16


def exact(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().double().requires_grad_(value.requires_grad)
    return value if value is None else LowRank(exact(value.a_ErI), exact(value.b_EOr), value.scale)


def close(values: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for value, right in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.cpu().double(), right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_low_rank_experts_equal_float64(device: torch.device, activation: str) -> None:
    layout, kept = padded(device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device) / shape[-1] ** 0.5

    num_projections = ACTIVATIONS[activation].num_projections
    w1 = random(E, 2, H, M) if num_projections == 2 else random(E, H, M)
    weights = Weights(w1, random(E, M, H), random(*w1.shape[:-1]), random(E, M - 4), 3)
    factors = [
        random(*shape).requires_grad_() for shape in ((E, 3, M), (E, num_projections * H, 3), (E, 5, H), (E, M, 5))
    ]
    adapters = Adapters(LowRank(factors[0], factors[1], 0.5), LowRank(factors[2], factors[3], 1.5))
    x_SM = random(layout.tokens, M).requires_grad_()
    weight_N = rows_of_nan_behind(kept, torch.empty(layout.rows, device=device)).requires_grad_()
    y_SM = low_rank_experts(x_SM, layout, weight_N, weights, adapters, activation)
    dy_SM = torch.randn_like(y_SM)
    dx_SM, dweight_N, *dfactors = torch.autograd.grad(y_SM, [x_SM, weight_N, *factors], dy_SM)
    assert not dweight_N[kept:].any()

    dense = Weights(*(exact(w) for w in (weights.w1, weights.w2, weights.b1, weights.b2)), weights.b2_start)
    pair, x, weight = Adapters(*map(exact, adapters)), exact(x_SM), exact(weight_N[:kept])
    cpu = Layout.of([None if one is None else one.cpu() for one in layout.exact().tensors])
    wanted = define_low_rank_experts(x, cpu, weight, dense, pair, activation)
    leaves = [x, weight, *(factor for one in pair if one for factor in one[:2])]
    grads = torch.autograd.grad(wanted, leaves, dy_SM.cpu().double())
    close((y_SM, dx_SM, dweight_N[:kept], *dfactors), (wanted, *grads))


@pytest.mark.parametrize("transposed", [True, False])
def test_low_rank_linear_equals_float64(device: torch.device, transposed: bool) -> None:
    layout, kept = padded(device)
    rows_NK = rows_of_nan_behind(kept, torch.empty(layout.rows, M, device=device)).requires_grad_()
    weight = torch.randn(E, H, M, device=device) / M**0.5
    a, b = torch.randn(E, 3, M, device=device) / M**0.5, torch.randn(E, H, 3, device=device)
    adapter = LowRank(a.requires_grad_(), b.requires_grad_(), 0.5)
    w = weight if transposed else weight.mT.contiguous()
    out_NO = low_rank_linear(rows_NK, layout, w, adapter, transposed=transposed)
    dout_NO = rows_of_nan_behind(kept, torch.empty(layout.rows, H, device=device))
    drows_NK, *dfactors = torch.autograd.grad(out_NO, [rows_NK, a, b], dout_NO)
    assert not out_NO[kept:].any() and not drows_NK[kept:].any()

    low, rows = exact(adapter), exact(rows_NK[:kept])
    matrix_N = (weight.cpu().double() + low.delta_EOI()).repeat_interleave(layout.counts_E.cpu(), 0)
    wanted = torch.einsum("nk,nok->no", rows, matrix_N)
    grads = torch.autograd.grad(wanted, [rows, *low[:2]], dout_NO[:kept].cpu().double())
    close((out_NO[:kept], drows_NK[:kept], *dfactors), (wanted, *grads))
