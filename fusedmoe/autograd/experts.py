"""The experts as one differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import experts_backward, experts_forward
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Weights
from fusedmoe.runtime.recorder import Recorder, span


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        b2_start: int,
        layout: Layout,
        activation: str,
        recorder: Recorder | None,
    ) -> Tensor:
        weights = Weights(w1, w2, b1, b2, b2_start)
        with span(recorder, "experts", kind="expert", phase="forward"):
            y_SM, h_NH = experts_forward(x_SM, layout, weight_N, weights, ACTIVATIONS[activation])
        ctx.save_for_backward(x_SM, weight_N, h_NH, w1, w2, b1, b2)
        ctx.b2_start, ctx.layout, ctx.activation, ctx.recorder = b2_start, layout, activation, recorder
        return y_SM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        x_SM, weight_N, h_NH, w1, w2, b1, b2 = ctx.saved_tensors
        weights = Weights(w1, w2, b1, b2, ctx.b2_start)
        with span(ctx.recorder, "experts", kind="expert", phase="backward"):
            grads = experts_backward(dy_SM, x_SM, h_NH, ctx.layout, weight_N, weights, ACTIVATIONS[ctx.activation])
        dweight_N = None if weight_N is None or grads.weight_N is None else grads.weight_N.to(weight_N.dtype)
        return grads.x_SM, dweight_N, grads.w1, grads.w2, grads.b1, grads.b2, None, None, None, None


def experts(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: str,
    recorder: Recorder | None = None,
) -> Tensor:
    """y_SM[s] = Σ over the rows n of token s of weight_N[n]·FFN_e(x_SM[s]): gather, experts, weighted gather-and-sum.

    Args:
        x_SM: [S, M] tokens (or received rows), floating point.
        layout: which rows copy which token, sorted by local expert.
        weight_N: [N] router weight of each sorted row, any floating dtype, or None for 1.
        weights: parameters of the local experts, in x's dtype.
        activation: a name of `fusedmoe.kernels.activation.ACTIVATIONS`.
    Returns:
        [S, M], x's dtype.
    Saves for backward:
        x_SM, weight_N and the pre-activation H: N·H elements, 2·N·H for a gated activation (plus the parameters, which
        exist anyway). The down projection's output is not saved: the router weight's gradient is ⟨dA', A⟩.
    Raises:
        ConfigError: unknown activation, or dtypes that differ.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if x_SM.dtype != weights.w1.dtype:
        raise ConfigError(
            f"the rows are {x_SM.dtype} and the experts {weights.w1.dtype}; convert one with .to(), or use autocast"
        )
    w = weights
    return _Experts.apply(
        x_SM, weight_N, w.w1, w.w2, w.b1, w.b2, w.b2_start, layout, activation, recorder
    )
