"""Padding rows: operations return zeros there, in gradients too, and never read them in inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe import autograd
from fusedmoe.autograd.order import take_pairs
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from tests.kernels.routings import choose

S, K, E, M, H = 13, 3, 4, 16, 16


def padded(device: torch.device) -> tuple[Layout, int]:
    """Return a layout with padding, and its true rows: one expert has none, so its capacity is all padding."""
    layout = autograd.order(choose(S, K, E - 1, 0.4).to(device), E, 7)
    kept = int(layout.offsets_E1[-1])
    assert layout.rows > kept
    return layout, kept


def test_permute_and_take_pairs_zero_padding_rows(device: torch.device) -> None:
    layout, kept = padded(device)
    x_SM = torch.randn(S, M, device=device, requires_grad=True)
    weight_SK = torch.rand(S, K, device=device, requires_grad=True)
    for rows in (autograd.permute(x_SM, layout), take_pairs(weight_SK, layout)):
        assert not rows[kept:].any() and rows[:kept].any()
        rows.backward(rows_of_nan_behind(kept, rows))
    for grad in (x_SM.grad, weight_SK.grad):
        assert grad is not None and grad.isfinite().all()
    rows_NM = rows_of_nan_behind(kept, torch.randn(layout.rows, M, device=device)).requires_grad_()
    y_SM = autograd.unpermute(rows_NM, layout)
    assert y_SM.isfinite().all()
    y_SM.backward(torch.randn_like(y_SM))
    assert rows_NM.grad is not None and rows_NM.grad.isfinite().all() and not rows_NM.grad[kept:].any()


def rows_of_nan_behind(kept: int, like: Tensor) -> Tensor:
    rows = torch.randn_like(like)
    rows[kept:] = torch.nan
    return rows


def test_router_weight_gradients_ignore_padding(device: torch.device) -> None:
    """A caller that gathers the weights by slots adds padding's gradient to token 0's."""
    layout, _ = padded(device)
    x_SM, weight_SK = torch.randn(S, M, device=device), torch.rand(S, K, device=device)
    for bias in (False, True):
        w1, w2 = torch.randn(E, 2, H, M, device=device) / 4, torch.randn(E, M, H, device=device) / 4
        b1 = torch.randn(E, 2, H, device=device) if bias else None
        b2 = torch.randn(E, M, device=device) if bias else None
        weights = Weights(w1, w2, b1, b2)
        by_slots, by_operation = weight_SK.clone().requires_grad_(), weight_SK.clone().requires_grad_()
        dy_SM = torch.randn_like(x_SM)
        for leaf, weight_N in (
            (by_slots, by_slots.reshape(-1)[layout.pair_N]),
            (by_operation, take_pairs(by_operation, layout)),
        ):
            autograd.experts(x_SM, layout, weight_N, weights, "swiglu").backward(dy_SM)
            assert leaf.grad is not None and leaf.grad.isfinite().all()
        assert by_slots.grad is not None and by_operation.grad is not None
        torch.testing.assert_close(by_slots.grad, by_operation.grad)
        assert not by_operation.grad[layout.row_SK < 0].any()
