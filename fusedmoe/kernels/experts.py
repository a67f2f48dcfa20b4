"""Expert networks over rows grouped by expert: y_SM[s] = Σ over the kept rows n of s of weight_N[n]·FFN_e(x_SM[s]).

FFN_e(x) = act(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e. Gather, both products, activation, router weight and gather-and-sum are one
operation, so that nothing of the size of the routed rows has to be kept but the pre-activation H: the backward
recomputes A = act(H), and the router weight's gradient is ⟨dA', A⟩ (SonicMoE), which spares the down projection's
output.

Contract: tensors in, tensors out; no autograd; the caller owns every buffer that is returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.kernels import experts_plain
from fusedmoe.kernels.activation import Activation, define_activation
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Gradients, Hidden, Weights


def flops(rows: int, weights: Weights, *, backward: bool = False) -> int:
    """Multiply-adds count as two. The backward has twice the forward's."""
    per_row = 2 * (weights.w1[0].numel() + weights.w2[0].numel())
    return rows * per_row * (2 if backward else 1)


def experts_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Computes y_SM and the pre-activation H of every row.

    Args:
        x_SM: tokens; layout says which rows copy which token, sorted by expert.
        weight_N: factor of each sorted row, or None for 1.
    Returns:
        y_SM like x_SM, and h_NH: [N, 2, H] or [N, H], to be kept for the backward.
    """
    if _fused(x_SM):
        from fusedmoe.kernels.grouped import launch

        return launch.experts_forward(x_SM, layout, weight_N, weights, activation)
    return experts_plain.experts_forward(x_SM, layout, weight_N, weights, activation)


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    into: Gradients | None = None,
) -> Gradients:
    """Gradients of `experts_forward` from its inputs and H. An expert without rows gets zero gradients.

    `into`: gradients of other rows, in at least float32, to whose parameters' part this one's is added in place.
    """
    if not _fused(x_SM) and (into is None or into.w1.dtype == x_SM.dtype):
        return experts_plain.experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation, into)
    if _fused(x_SM):
        from fusedmoe.kernels.grouped import launch

        own = launch.experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    else:
        own = experts_plain.experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    return own if into is None else own.added_to(into)


def experts_backward_rows(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Hidden]:
    """The first half of `experts_backward`: gradients of x_SM and weight_N, and what the second half needs.

    What waits for rows need not wait for products that only parameters need (Lancet §4).
    """
    if _fused(x_SM):
        from fusedmoe.kernels.grouped import launch

        return launch.experts_backward_rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    return experts_plain.experts_backward_rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)


def experts_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor,
    left: Hidden,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
) -> Gradients:
    """The second half of `experts_backward`: the parameters' gradients, its `x_SM` and `weight_N` without meaning.

    `into`: gradients of other rows, in at least float32, to which these are added in place.
    """
    if not _fused(x_SM) and (into is None or into.w1.dtype == x_SM.dtype):
        return experts_plain.experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights, into)
    if _fused(x_SM):
        from fusedmoe.kernels.grouped import launch

        own = launch.experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights)
    else:
        own = experts_plain.experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights)
    return own if into is None else own.added_to(into)


def _fused(x_SM: Tensor) -> bool:
    """Tensor cores know no float64, and without tokens there is nothing to launch."""
    return uses_triton(x_SM) and x_SM.dtype != torch.float64 and x_SM.shape[0] > 0


def define_experts(x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: str) -> Tensor:
    """What the operation computes, in plain differentiable torch, row by row."""
    y_SM = [x_SM.new_zeros(weights.w2.shape[1]) for _ in x_SM]
    expert_N = [e for e, count in enumerate(layout.counts) for _ in range(count)]
    source_N = range(len(expert_N)) if layout.source_N is None else layout.source_N.tolist()
    for n, (e, s) in enumerate(zip(expert_N, source_N, strict=True)):
        h = (weights.w1[e] * x_SM[s]).sum(-1)
        if weights.b1 is not None:
            h = h + weights.b1[e]
        y = (weights.w2[e] * define_activation(activation, h)).sum(-1)
        if weights.b2 is not None:
            start = weights.b2_start
            y = y + torch.nn.functional.pad(weights.b2[e], (start, len(y) - start - weights.b2.shape[1]))
        y_SM[s] = y_SM[s] + (y if weight_N is None else y * weight_N[n])
    return torch.stack(y_SM) if y_SM else x_SM.new_zeros(0, weights.w2.shape[1])
