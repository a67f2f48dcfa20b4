"""The experts as a differentiable function, and its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_layout, check_row_weights, check_rows, check_weights
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.derivatives import Function, operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.experts import NeedsGrad, Weights
from fusedmoe.kernels.experts import experts_backward as backward_kernels
from fusedmoe.kernels.experts import experts_forward as forward_kernels
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.runtime.recorder import active_recorder, span


def experts(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: str,
) -> Tensor:
    """Compute y_SM[s] = Σ_n weight_N[n]·FFN_e(x_SM[s]) over the rows n of token s: gather, expert FFN, weighted sum.

    Args:
        x_SM: [S, M] tokens (or received rows), floating point, any strides.
        layout: maps rows, sorted by local expert, to tokens.
        weight_N: [N] router weight of each sorted row, any floating dtype, or None for 1.
        weights: parameters of the local experts, in x's dtype; non-contiguous ones are copied first.
        activation: a name of `fusedmoe.kernels.activation.ACTIVATIONS`.
    Returns:
        [S, M'] in x's dtype, where M' is the output width of w2. The gradient of weight_N is zero in padding rows.
    Saves for backward:
        x_SM (unless w1 is frozen), weight_N and the pre-activation: N·H elements, 2·N·H if gated (unless at most b2
        needs a gradient). The parameters are referenced. If all are frozen, backward does half of the work.
    Raises:
        ConfigError: unknown activation, inconsistent shapes, dtypes or devices, or an inconsistent handmade layout.
    """
    check_layout("experts", layout)
    check_rows("experts", "x_SM", x_SM, layout.tokens, layout.row_SK)
    check_floats("experts", "x_SM", x_SM)
    if weight_N is not None:
        check_row_weights("experts", weight_N, layout)
    check_weights("experts", weights, activation, x_SM, layout.experts)
    # Outside the operator, because autograd must record the copy.
    w, recorder = weights.contiguous(), active_recorder()
    with span(recorder, "experts", kind="expert", phase="forward"):
        y_SM, _ = experts_operator(x_SM, weight_N, w.w1, w.w2, w.b1, w.b2, w.b2_start, layout.tensors, activation)
    if recorder is not None and y_SM.grad_fn is not None:
        y_SM.grad_fn.recorder = recorder  # grad_fn is the `ctx` of the backward
    return y_SM


def cast_down(out_RM: Tensor, rows_RM: Tensor) -> Tensor:
    """Cast results to the rows' dtype if theirs is wider, which would double the bytes of combine and its gradient."""
    return out_RM.to(rows_RM.dtype) if out_RM.element_size() > rows_RM.element_size() else out_RM


@operator("experts")
def experts_operator(
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    layout: LayoutTensors,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return y_SM and the pre-activation h_NH, [N, (2,) H]."""
    weights = Weights(w1, w2, b1, b2, b2_start)
    return forward_kernels(x_SM, Layout.of(layout), weight_N, weights, ACTIVATIONS[activation])


@register_fake(experts_operator)
def _(x_SM: Tensor, weight_N: Any, w1: Tensor, w2: Tensor, b1: Any, b2: Any, b2_start: int, layout: Any, _: str) -> Any:
    return x_SM.new_empty((x_SM.shape[0], w2.shape[1])), x_SM.new_empty((Layout.of(layout).rows, *w1.shape[1:-1]))


def row_flops(*shapes: Sequence[int] | None) -> int:
    return sum(2 * prod(shape[1:]) for shape in shapes if shape is not None)


@register_flops(experts_operator)
def _(x_SM: Any, weight_N: Any, w1: Any, w2: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return int(out_shape[1][0] * row_flops(w1, w2))


@operator("experts_backward")
def experts_backward(
    dy_SM: Tensor,
    h_NH: Tensor | None,
    x_SM: Tensor | None,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    layout: LayoutTensors,
    activation: str,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x_SM, weight_N, w1, w2, b1 and b2; empty tensors for those without `needs_grad`.

    h_NH and x_SM may be None if no needed gradient reads them.
    """
    weights, needed = Weights(w1, w2, b1, b2, b2_start), NeedsGrad(*needs_grad)
    given = (Layout.of(layout), weight_N, weights, ACTIVATIONS[activation])
    grads = backward_kernels(dy_SM, x_SM, h_NH, *given, needs_grad=needed)
    dweight_N = grads.weight_N
    if weight_N is not None and dweight_N is not None:
        dweight_N = dweight_N.to(weight_N.dtype)
    # Operators have no optional results, and two results must not be the same tensor.
    results = (grads.x_SM, dweight_N, *grads.parameters)
    dx, dweight, dw1, dw2, db1, db2 = [dy_SM.new_empty(0) if grad is None else grad for grad in results]
    return dx, dweight, dw1, dw2, db1, db2


@register_fake(experts_backward)
def _(dy_SM: Tensor, h_NH: Any, x_SM: Any, *others: Any) -> tuple[Tensor, ...]:
    *parameters, needs_grad = *others[:5], others[-1]
    x_like = dy_SM.new_empty((dy_SM.shape[0], parameters[1].shape[-1]))
    pairs = zip((x_like, *parameters), needs_grad, strict=True)
    return tuple(
        tensor.new_empty(tensor.shape) if needed and tensor is not None else dy_SM.new_empty(0)
        for tensor, needed in pairs
    )


@register_flops(experts_backward)
def _(dy_SM: Any, h_NH: Any, x_SM: Any, weight_N: Any, w1: Any, w2: Any, *others: Any, **__: Any) -> int:
    *_, layout, _, needs_grad = others
    return int(layout[3][0] * backward_flops(NeedsGrad(*needs_grad), w1, w2))


def backward_flops(needs_grad: NeedsGrad, w1: Any, w2: Any) -> int:
    """Return the backward FLOPs of one row, given the shapes of w1 and w2."""
    needs_da = needs_grad.x_SM or needs_grad.weight_N or needs_grad.w1 or needs_grad.b1
    products = ((needs_da, w2), (needs_grad.x_SM, w1), (needs_grad.w1, w1), (needs_grad.w2, w2))
    return row_flops(*(shape for needed, shape in products if needed))


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.b2_start, layout, ctx.activation = inputs
    # Operators cannot save intermediates, so h_NH is an output.
    h_NH = output[1]
    ctx.mark_non_differentiable(h_NH)
    # Autograd would materialize zeros for a missing gradient of y.
    ctx.set_materialize_grads(False)
    needs_grad = ctx.needs_grad = NeedsGrad(*ctx.needs_input_grad[:6])
    x_SM, weight_N, w1, w2, b1, b2 = tensors
    # dA reads W2; dA and A read H.
    needs_da = needs_grad.x_SM or needs_grad.weight_N or needs_grad.w1 or needs_grad.b1
    ctx.save_for_backward(
        h_NH if needs_da or needs_grad.w2 else None,
        x_SM if needs_grad.w1 else None,
        weight_N,
        # Autocast's cast copies of parameters are as large as the parameters.
        w1 if needs_grad.x_SM else placeholder_like(w1),
        w2 if needs_da else placeholder_like(w2),
        b1,
        b2,
        *layout,
    )
    ctx.recorder = None


def placeholder_like(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape backed by one element, for arguments that are never read."""
    return tensor.new_empty(()).expand(tensor.shape)


def _gradients(ctx: Any, dy_SM: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SM is None:
        return (None,) * 9
    h_NH, *saved = ctx.saved_tensors
    tensors, layout = saved[:6], saved[6:]
    with span(ctx.recorder, "experts", kind="expert", phase="backward"):
        grads = experts_backward(dy_SM, h_NH, *tensors, ctx.b2_start, layout, ctx.activation, ctx.needs_grad)
    return *[grad if needed else None for grad, needed in zip(grads, ctx.needs_grad, strict=True)], None, None, None


register_gradient(experts_operator, _gradients, _save_for_backward)


class WeightParts(NamedTuple):
    """Functions that build expert weights from several parameters.

    Attributes:
        join: builds contiguous w1 and w2 of `fusedmoe.kernels.Weights` from the parts, in the dtype of the rows.
        split: the inverse, for gradients.
    """

    join: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    split: Callable[[Tensor, Tensor], Sequence[Tensor]]


def experts_in_parts(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    parts: Sequence[Tensor],
    weight_parts: WeightParts,
    activation: str,
) -> Tensor:
    """Compute `fusedmoe.autograd.experts` without biases, with weights joined from parts during each pass.

    Args:
        parts: parameters, in the order of `weight_parts.join`; each gets a gradient in its dtype, if its matrix has a
            part that requires grad.
    Saves for backward:
        The parts (so FSDP can free gathered weights), weight_N, the pre-activation, and x_SM unless all parts of w1 are
        frozen.
    """
    y_SM: Tensor = _JoinedExpertsFunction.apply(x_SM, weight_N, layout, weight_parts, activation, *parts)
    return y_SM


class _JoinedExpertsFunction(Function):
    operation = "autograd.experts_in_parts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        layout: Layout,
        weight_parts: WeightParts,
        activation: str,
        *parts: Tensor,
    ) -> Tensor:
        # Joined again in backward, so the weights occupy memory only during a pass.
        w1, w2 = weight_parts.join([part.to(x_SM.dtype) for part in parts])
        y_SM, h = experts_operator(x_SM, weight_N, w1, w2, None, None, 0, layout.tensors, activation)
        x, weight, *_ = ctx.needs_input_grad
        needs_grad = ctx.needs_grad = NeedsGrad(
            x, weight, *parts_need_grad(weight_parts, w1, w2, ctx.needs_input_grad[5:]), False, False
        )
        ctx.save_for_backward(
            h if needs_grad.h_NH else None, x_SM if needs_grad.w1 else None, weight_N, *layout.tensors, *parts
        )
        ctx.weight_parts, ctx.activation = weight_parts, activation
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        h, x_SM, weight_N, *saved = ctx.saved_tensors
        layout, parts, needs_grad = saved[:5], saved[5:], ctx.needs_grad
        w1, w2 = ctx.weight_parts.join([part.to(dy_SM.dtype) for part in parts])
        given = (dy_SM, h, x_SM, weight_N, w1, w2, None, None, 0, layout, ctx.activation, needs_grad)
        dx_SM, dweight_N, dw1, dw2, *_ = experts_backward(*given)
        dparts: list[Tensor | None] = [None] * len(parts)
        if needs_grad.parameters:
            dw1, dw2 = dw1 if needs_grad.w1 else placeholder_like(w1), dw2 if needs_grad.w2 else placeholder_like(w2)
            pairs = zip(ctx.weight_parts.split(dw1, dw2), parts, ctx.needs_input_grad[5:], strict=True)
            dparts = [grad.to(part.dtype) if needed else None for grad, part, needed in pairs]
        return dx_SM if needs_grad.x_SM else None, dweight_N if needs_grad.weight_N else None, None, None, None, *dparts


def parts_need_grad(weight_parts: WeightParts, w1: Tensor, w2: Tensor, needs_grad: Sequence[bool]) -> tuple[bool, bool]:
    if all(needs_grad) or not any(needs_grad) or torch.compiler.is_compiling():
        return any(needs_grad), any(needs_grad)
    # A part that is a view shares memory with its matrix; a copy may belong to both.
    placeholders = placeholder_like(w1), placeholder_like(w2)
    first, second = (matrix.untyped_storage().data_ptr() for matrix in placeholders)
    parts = zip(weight_parts.split(*placeholders), needs_grad, strict=True)
    storages = [part.untyped_storage().data_ptr() for part, needed in parts if needed]
    return any(storage != second for storage in storages), any(storage != first for storage in storages)
