"""The experts as one differentiable function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_layout, check_row_values, check_rows, check_weights
from fusedmoe.kernels import operators
from fusedmoe.kernels.derivatives import register_gradient
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Weights
from fusedmoe.runtime.recorder import Recorder, span


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
        x_SM: [S, M] tokens (or received rows), floating point, any strides.
        layout: which rows copy which token, sorted by local expert.
        weight_N: [N] router weight of each sorted row, any floating dtype, or None for 1; see `take_pairs`.
        weights: parameters of the local experts, in x's dtype. Those that are not contiguous are copied first.
        activation: a name of `fusedmoe.kernels.activation.ACTIVATIONS`.
    Returns:
        [S, M], as wide as w2 makes it, in x's dtype. Gradients of weight_N are zero in padding rows.
    Saves for backward:
        x_SM, weight_N and the pre-activation H: N·H elements, 2·N·H for a gated activation (plus the parameters, which
        exist anyway). The down projection's output is not saved: the router weight's gradient is ⟨dA', A⟩.
    Raises:
        ConfigError: unknown activation; shapes, dtypes or devices that do not fit each other; a layout made by hand
            whose numbers do not.
    """
    check_layout("experts", layout)
    check_rows("experts", "x_SM", x_SM, layout.tokens, layout.row_SK)
    check_floats("experts", "x_SM", x_SM)
    if weight_N is not None:
        check_row_values("experts", "weight_N", weight_N, layout)
    check_weights("experts", weights, activation, x_SM, layout.experts)
    w = weights.contiguous()
    with span(recorder, "experts", kind="expert", phase="forward"):
        y_SM, _ = operators.experts(x_SM, weight_N, w.w1, w.w2, w.b1, w.b2, w.b2_start, *layout.tensors, activation)
    if recorder is not None and y_SM.grad_fn is not None:
        y_SM.grad_fn.recorder = recorder  # the context that `_backward` gets
    return y_SM


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_SM, weight_N, w1, w2, b1, b2, b2_start, *layout, activation = inputs
    h_NH = output[1]
    ctx.mark_non_differentiable(h_NH)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h_NH, x_SM, weight_N, w1, w2, b1, b2, *layout)
    ctx.b2_start, ctx.activation, ctx.recorder = b2_start, activation, None


def _backward(ctx: Any, dy_SM: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SM is None:
        return (None,) * 13
    h_NH, *given, counts_E, offsets_E1, source_N, pair_N, row_SK = ctx.saved_tensors
    layout = (counts_E, offsets_E1, source_N, pair_N, row_SK)
    with span(ctx.recorder, "experts", kind="expert", phase="backward"):
        grads = operators.experts_backward(dy_SM, h_NH, *given, ctx.b2_start, *layout, ctx.activation)
    kept = (None if tensor is None else grad for tensor, grad in zip(given, grads, strict=True))
    return *kept, *(None,) * 7


register_gradient(operators.experts, _backward, _setup)
