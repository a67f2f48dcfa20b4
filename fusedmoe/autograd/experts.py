"""The experts: one function with a gradient, and its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_layout, check_row_weights, check_rows, check_weights
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.derivatives import Function, operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.experts import Wanted, Weights
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
        exist anyway). The down projection's output is not saved: the router weight's gradient is ⟨dA', A⟩. Without a
        gradient of w1 x_SM is not saved, and with none but b2's not the pre-activation either. The backward computes
        what needs a gradient alone: half of it where all parameters are frozen.
    Raises:
        ConfigError: unknown activation; shapes, dtypes or devices that do not fit each other; a layout made by hand
            whose numbers do not.
    """
    check_layout("experts", layout)
    check_rows("experts", "x_SM", x_SM, layout.tokens, layout.row_SK)
    check_floats("experts", "x_SM", x_SM)
    if weight_N is not None:
        check_row_weights("experts", weight_N, layout)
    check_weights("experts", weights, activation, x_SM, layout.experts)
    # Outside the operator, so that autograd sees the copy.
    w, recorder = weights.contiguous(), active_recorder()
    with span(recorder, "experts", kind="expert", phase="forward"):
        y_SM, _ = experts_operator(x_SM, weight_N, w.w1, w.w2, w.b1, w.b2, w.b2_start, layout.tensors, activation)
    if recorder is not None and y_SM.grad_fn is not None:
        y_SM.grad_fn.recorder = recorder  # the context that the backward gets
    return y_SM


def no_wider(out_RM: Tensor, rows_RM: Tensor) -> Tensor:
    """Experts' results as they travel: in the rows' dtype, where theirs has more bytes."""
    # Modules that compute wider would double what travels back, and their gradient with it.
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
    """Returns y_SM and the pre-activation h_NH, [N, (2,) H]."""
    weights = Weights(w1, w2, b1, b2, b2_start)
    return forward_kernels(x_SM, Layout.of(layout), weight_N, weights, ACTIVATIONS[activation])


@register_fake(experts_operator)
def _(x_SM: Tensor, weight_N: Any, w1: Tensor, w2: Tensor, b1: Any, b2: Any, b2_start: int, layout: Any, _: str) -> Any:
    # Sizes follow from those of x, the layout and the weights alone, so a graph needs no dynamic ones.
    return x_SM.new_empty((x_SM.shape[0], w2.shape[1])), x_SM.new_empty((Layout.of(layout).rows, *w1.shape[1:-1]))


def row_flops(*shapes: Sequence[int] | None) -> int:
    """FLOPs of one row's products with matrices of its expert, of which these are the stacks' shapes."""
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
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns gradients of x_SM, weight_N, w1, w2, b1 and b2, of those that are `wanted`; an empty tensor for others.

    h_NH and x_SM may be None where no wanted gradient needs them (see `kernels.experts.Wanted`).
    """
    weights, asked = Weights(w1, w2, b1, b2, b2_start), Wanted(*wanted)
    given = (Layout.of(layout), weight_N, weights, ACTIVATIONS[activation])
    grads = backward_kernels(dy_SM, x_SM, h_NH, *given, wanted=asked)
    dweight_N = grads.weight_N
    if weight_N is not None and dweight_N is not None:
        dweight_N = dweight_N.to(weight_N.dtype)
    # A schema knows no optional results, and no two may be the same tensor.
    found = (grads.x_SM, dweight_N, *grads.parameters)
    dx, dweight, dw1, dw2, db1, db2 = [dy_SM.new_empty(0) if grad is None else grad for grad in found]
    return dx, dweight, dw1, dw2, db1, db2


@register_fake(experts_backward)
def _(dy_SM: Tensor, h_NH: Any, x_SM: Any, *others: Any) -> tuple[Tensor, ...]:
    *parameters, wanted = *others[:5], others[-1]
    x_like = dy_SM.new_empty((dy_SM.shape[0], parameters[1].shape[-1]))
    pairs = zip((x_like, *parameters), wanted, strict=True)
    return tuple(
        tensor.new_empty(tensor.shape) if asked and tensor is not None else dy_SM.new_empty(0)
        for tensor, asked in pairs
    )


@register_flops(experts_backward)
def _(dy_SM: Any, h_NH: Any, x_SM: Any, weight_N: Any, w1: Any, w2: Any, *others: Any, **__: Any) -> int:
    *_, layout, _, wanted = others
    return int(layout[3][0] * backward_flops(Wanted(*wanted), w1, w2))


def backward_flops(wanted: Wanted, w1: Any, w2: Any) -> int:
    """FLOPs of one row in the backward of experts with matrices of these shapes."""
    needs_da = wanted.x_SM or wanted.weight_N or wanted.w1 or wanted.b1
    products = ((needs_da, w2), (wanted.x_SM, w1), (wanted.w1, w1), (wanted.w2, w2))
    return row_flops(*(shape for asked, shape in products if asked))


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.b2_start, layout, ctx.activation = inputs
    # An output only because operators keep nothing themselves: no gradient goes through it.
    h_NH = output[1]
    ctx.mark_non_differentiable(h_NH)
    # Without a gradient of y there is none of anything; autograd would make zeros otherwise.
    ctx.set_materialize_grads(False)
    wanted = ctx.wanted = Wanted(*ctx.needs_input_grad[:6])
    x_SM, weight_N, w1, w2, b1, b2 = tensors
    # W2 is read for the activations' gradient, and H for that and for A.
    needs_da = wanted.x_SM or wanted.weight_N or wanted.w1 or wanted.b1
    ctx.save_for_backward(
        h_NH if needs_da or wanted.w2 else None,
        x_SM if wanted.w1 else None,
        weight_N,
        # A cast copy of parameters, as autocast makes, is as large as these.
        w1 if wanted.x_SM else shape_of(w1),
        w2 if needs_da else shape_of(w2),
        b1,
        b2,
        *layout,
    )
    ctx.recorder = None


def shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor of this one's shape, without memory of its size, for what is never read."""
    return tensor.new_empty(()).expand(tensor.shape)


def _gradients(ctx: Any, dy_SM: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SM is None:
        return (None,) * 9
    h_NH, *saved = ctx.saved_tensors
    tensors, layout = saved[:6], saved[6:]
    with span(ctx.recorder, "experts", kind="expert", phase="backward"):
        grads = experts_backward(dy_SM, h_NH, *tensors, ctx.b2_start, layout, ctx.activation, ctx.wanted)
    return *[grad if asked else None for grad, asked in zip(grads, ctx.wanted, strict=True)], None, None, None


register_gradient(experts_operator, _gradients, _keep)


class WeightParts(NamedTuple):
    """Functions that make weights of parts.

    Attributes:
        join: the parts, in the dtype of the rows, as w1 and w2 of `fusedmoe.kernels.Weights`, contiguous.
        split: its inverse, for their gradients.
    """

    join: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    split: Callable[[Tensor, Tensor], Sequence[Tensor]]


def experts_in_parts(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, parts: Sequence[Tensor], how: WeightParts, activation: str
) -> Tensor:
    """Computes `fusedmoe.autograd.experts` without biases, with weights that lie in parts.

    The weights live while a pass runs.

    Args:
        x_SM, layout, weight_N, activation: as for `fusedmoe.autograd.experts`.
        parts: parameters, in the order in which `how` joins them; each gets a gradient in its own dtype.
        how: what joins parts to weights, and splits the weights' gradients.
    Saves for backward:
        The parts themselves, so that FSDP can free what it gathered, with weight_N and the pre-activation; and x_SM,
        unless all parts of w1 are frozen. Gradients of a matrix whose parts are frozen are not computed.
    """
    y_SM: Tensor = _InParts.apply(x_SM, weight_N, layout, how, activation, *parts)
    return y_SM


class _InParts(Function):
    operation = "autograd.experts_in_parts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        layout: Layout,
        how: WeightParts,
        activation: str,
        *parts: Tensor,
    ) -> Tensor:
        # Joined again in the backward: the weights take memory only while a pass runs.
        w1, w2 = how.join([part.to(x_SM.dtype) for part in parts])
        y_SM, h = experts_operator(x_SM, weight_N, w1, w2, None, None, 0, layout.tensors, activation)
        x, weight, *_ = ctx.needs_input_grad
        wanted = ctx.wanted = Wanted(x, weight, *learning_weights(how, w1, w2, ctx.needs_input_grad[5:]), False, False)
        ctx.save_for_backward(
            h if wanted.h_NH else None, x_SM if wanted.w1 else None, weight_N, *layout.tensors, *parts
        )
        ctx.how, ctx.activation = how, activation
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        h, x_SM, weight_N, *saved = ctx.saved_tensors
        layout, parts, wanted = saved[:5], saved[5:], ctx.wanted
        w1, w2 = ctx.how.join([part.to(dy_SM.dtype) for part in parts])
        given = (dy_SM, h, x_SM, weight_N, w1, w2, None, None, 0, layout, ctx.activation, wanted)
        dx_SM, dweight_N, dw1, dw2, *_ = experts_backward(*given)
        dparts: list[Tensor | None] = [None] * len(parts)
        if wanted.parameters:
            dw1, dw2 = dw1 if wanted.w1 else shape_of(w1), dw2 if wanted.w2 else shape_of(w2)
            pairs = zip(ctx.how.split(dw1, dw2), parts, ctx.needs_input_grad[5:], strict=True)
            dparts = [grad.to(part.dtype) if asked else None for grad, part, asked in pairs]
        return dx_SM if wanted.x_SM else None, dweight_N if wanted.weight_N else None, None, None, None, *dparts


def learning_weights(how: WeightParts, w1: Tensor, w2: Tensor, learns: Sequence[bool]) -> tuple[bool, bool]:
    """Tells of w1 and w2 whether a part of them learns."""
    if all(learns) or not any(learns) or torch.compiler.is_compiling():
        return any(learns), any(learns)
    # Each part of a split is in the memory of what it is a part of; one that is a copy may be of both.
    marks = shape_of(w1), shape_of(w2)
    first, second = (mark.untyped_storage().data_ptr() for mark in marks)
    places = [part.untyped_storage().data_ptr() for part in how.split(*marks)]
    learnt = [place for place, learns_too in zip(places, learns, strict=True) if learns_too]
    return any(place != second for place in learnt), any(place != first for place in learnt)
