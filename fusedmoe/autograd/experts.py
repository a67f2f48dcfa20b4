"""The experts: one function with a gradient, and its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_layout, check_row_values, check_rows, check_weights
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.derivatives import Function, operator, register_fake, register_gradient
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.experts import experts_backward as backward_kernels
from fusedmoe.kernels.experts import experts_forward as forward_kernels
from fusedmoe.kernels.layout import Layout, LayoutTensors
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
    # Outside the operator, so that autograd sees the copy.
    w = weights.contiguous()
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


@operator("experts_backward")
def experts_backward(
    dy_SM: Tensor,
    h_NH: Tensor,
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    layout: LayoutTensors,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns gradients of x_SM, weight_N, w1, w2, b1 and b2; an empty tensor for what was None."""
    weights = Weights(w1, w2, b1, b2, b2_start)
    grads = backward_kernels(dy_SM, x_SM, h_NH, Layout.of(layout), weight_N, weights, ACTIVATIONS[activation])
    # A schema knows no optional results, and no two may be the same tensor.
    dweight_N = x_SM.new_empty(0)
    if weight_N is not None and grads.weight_N is not None:
        dweight_N = grads.weight_N.to(weight_N.dtype)
    db1 = x_SM.new_empty(0) if grads.b1 is None else grads.b1
    db2 = x_SM.new_empty(0) if grads.b2 is None else grads.b2
    return grads.x_SM, dweight_N, grads.w1, grads.w2, db1, db2


@register_fake(experts_backward)
def _(dy_SM: Tensor, h_NH: Tensor, x_SM: Tensor, *others: Any) -> tuple[Tensor, ...]:
    given = (x_SM, *others[:5])
    return tuple(x_SM.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in given)


def _keep(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.b2_start, layout, ctx.activation = inputs
    # An output only because operators keep nothing themselves: nobody differentiates through it.
    h_NH = output[1]
    ctx.mark_non_differentiable(h_NH)
    # Without a gradient of y there is none of anything; autograd would make zeros otherwise.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h_NH, *tensors, *layout)
    ctx.recorder = None


def _gradients(ctx: Any, dy_SM: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SM is None:
        return (None,) * 9
    h_NH, *saved = ctx.saved_tensors
    tensors, layout = saved[:6], saved[6:]
    with span(ctx.recorder, "experts", kind="expert", phase="backward"):
        grads = experts_backward(dy_SM, h_NH, *tensors, ctx.b2_start, layout, ctx.activation)
    dx_SM, dweight_N, dw1, dw2, db1, db2 = grads
    _, weight_N, _, _, b1, b2 = tensors
    dweight_N, db1 = None if weight_N is None else dweight_N, None if b1 is None else db1
    return dx_SM, dweight_N, dw1, dw2, db1, None if b2 is None else db2, None, None, None


register_gradient(experts_operator, _gradients, _keep)


class WeightParts(NamedTuple):
    """Functions that make weights of parts.

    Attributes:
        join: the parts, in the dtype of the rows, as w1 and w2 of `fusedmoe.ops.Weights`, contiguous.
        split: its inverse, for their gradients.
    """

    join: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    split: Callable[[Tensor, Tensor], Sequence[Tensor]]


def experts_in_parts(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, parts: Sequence[Tensor], how: WeightParts, activation: str
) -> Tensor:
    """Computes `fusedmoe.ops.experts` without biases, with weights that lie in parts.

    The weights live while a pass runs.

    Args:
        x_SM, layout, weight_N, activation: as for `fusedmoe.ops.experts`.
        parts: parameters, in the order in which `how` joins them; each gets a gradient in its own dtype.
        how: what joins parts to weights, and splits the weights' gradients.
    Saves for backward:
        The parts themselves, so that FSDP can free what it gathered, with x_SM, weight_N and the pre-activation.
    """
    y_SM: Tensor = _InParts.apply(x_SM, weight_N, layout, how, activation, *parts)
    return y_SM


class _InParts(Function):
    operation = "ops.experts_in_parts"

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
        ctx.save_for_backward(h, x_SM, weight_N, *layout.tensors, *parts)
        ctx.how, ctx.activation = how, activation
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        h, x_SM, weight_N, *saved = ctx.saved_tensors
        layout, parts = saved[:5], saved[5:]
        w1, w2 = ctx.how.join([part.to(x_SM.dtype) for part in parts])
        given = (dy_SM, h, x_SM, weight_N, w1, w2, None, None, 0, layout, ctx.activation)
        dx_SM, dweight_N, dw1, dw2, *_ = experts_backward(*given)
        dparts = [grad.to(part.dtype) for grad, part in zip(ctx.how.split(dw1, dw2), parts, strict=True)]
        return dx_SM, None if weight_N is None else dweight_N, None, None, None, *dparts
