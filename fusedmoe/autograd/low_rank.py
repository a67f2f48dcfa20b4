"""Experts and grouped linear maps with low-rank (LoRA) adapters, as differentiable functions and operators.

The frozen matrices get no gradient, and no pass allocates a tensor of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmoe.autograd.checks import (
    check_floats,
    check_layout,
    check_row_weights,
    check_rows,
    check_tensor,
    check_weights,
    refuse,
)
from fusedmoe.autograd.experts import row_flops
from fusedmoe.autograd.grouped import check_linear
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.derivatives import Function, operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.kernels.low_rank import (
    Adapters,
    LowRank,
    StoredWeights,
    low_rank_backward,
    low_rank_factor_gradients,
    low_rank_forward,
    low_rank_input_gradient,
    low_rank_product,
)


def low_rank_experts(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights | StoredWeights,
    adapters: Adapters,
    activation: str,
) -> Tensor:
    """Compute `fusedmoe.autograd.experts` with W + scale·B·A in place of the frozen W1 and W2, without forming the sum.

    Args:
        weights: the frozen parameters, in x's dtype; non-contiguous ones are copied first. `StoredWeights` (quantized)
            are materialized one expert at a time and do not enter compiled graphs.
        adapters: adapters of W1 and W2; each may be None. Factors in x's dtype: A [e, r, M] and B [e, 2·H, r] (not
            gated: H) of W1, both halves stacked as in w1.flatten(1, -2); A [e, r, H] and B [e, M, r] of W2.
    Saves for backward:
        x_SM, weight_N and the pre-activation, as `experts`, and N·r elements per adapter.
    Raises:
        ConfigError: as `experts`; factors of wrong shape or dtype; weights that require grad.
    """
    name = "low_rank_experts"
    check_layout(name, layout)
    check_rows(name, "x_SM", x_SM, layout.tokens, layout.row_SK)
    check_floats(name, "x_SM", x_SM)
    if weight_N is not None:
        check_row_weights(name, weight_N, layout)
    if isinstance(weights, StoredWeights):
        shapes = _check_stored(name, weights, activation, x_SM, layout.experts)
    else:
        check_weights(name, weights, activation, x_SM, layout.experts)
        shapes = (weights.w1.flatten(1, -2).shape, weights.w2.shape)
        trained = (w is not None and w.requires_grad for w in (weights.w1, weights.w2, weights.b1, weights.b2))
        if any(trained):
            refuse(name, "weights get no gradient here: freeze them with requires_grad_(False), or add B·A to them")
    for which, adapter, shape in zip(adapters._fields, adapters, shapes, strict=True):
        if adapter is not None:
            _check_factors(name, f"the {which} adapter", adapter, x_SM, *shape)
    adapters = adapters.contiguous()
    factors = [None if one is None else one[at] for one in adapters for at in range(2)]
    scales = [1.0 if one is None else float(one.scale) for one in adapters]
    y_SM: Tensor
    if isinstance(weights, StoredWeights):
        y_SM = _StoredLowRankExperts.apply(x_SM, weight_N, layout, weights, activation, scales, *factors)
        return y_SM
    w = weights.contiguous()
    y_SM, _ = low_rank_experts_operator(
        x_SM, weight_N, w.w1, w.w2, w.b1, w.b2, w.b2_start, *factors, scales, layout.tensors, activation
    )
    return y_SM


def _check_stored(
    operation: str, weights: StoredWeights, activation: str, x_SM: Tensor, experts: int
) -> tuple[Sequence[int], Sequence[int]]:
    if activation not in ACTIVATIONS:
        refuse(operation, f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    up, down = tuple(weights.up.shape), tuple(weights.down.shape)
    width, num_projections = x_SM.shape[1], ACTIVATIONS[activation].num_projections
    if len(down) != 3 or down[0] != experts or up != (experts, num_projections * down[2], width):
        form = f"[{experts}, {'2·H' if num_projections == 2 else 'H'}, {width}] and [{experts}, M, H]"
        refuse(operation, f"for {activation!r} the matrices must be {form}; got {list(up)} and {list(down)}")
    for name, bias, shape in (("b1", weights.b1, up[:2]), ("b2", weights.b2, down[:2])):
        if bias is not None and (tuple(bias.shape) != shape or bias.dtype != x_SM.dtype or bias.requires_grad):
            refuse(
                operation, f"{name} must be {list(shape)} in {x_SM.dtype}, frozen; got {bias.dtype} {list(bias.shape)}"
            )
    return up, down


class _StoredLowRankExperts(Function):
    operation = "autograd.low_rank_experts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        layout: Layout,
        weights: StoredWeights,
        activation: str,
        scales: list[float],
        *factors: Tensor | None,
    ) -> Tensor:
        adapters = _adapters(factors, scales)
        y_SM, hidden_NL = low_rank_forward(x_SM, layout, weight_N, weights, adapters, ACTIVATIONS[activation])
        ctx.save_for_backward(hidden_NL, x_SM, weight_N, *factors, *layout.tensors)
        ctx.weights, ctx.activation, ctx.scales = weights, activation, scales
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NL, x_SM, weight_N, *saved = ctx.saved_tensors
        adapters, layout = _adapters(saved[:4], ctx.scales), Layout.of(saved[4:])
        needs_grads = ctx.needs_input_grad[6:]
        given = (dy_SM, x_SM, hidden_NL, layout, weight_N, ctx.weights, adapters, ACTIVATIONS[ctx.activation])
        dx_SM, dweight_N, factors = low_rank_backward(*given, any(needs_grads), ctx.needs_input_grad[0])
        grads = (grad if needed else None for grad, needed in zip(factors, needs_grads, strict=True))
        dweight_N = None if weight_N is None or dweight_N is None else dweight_N.to(weight_N.dtype)
        return dx_SM, dweight_N, None, None, None, None, *grads


def _check_factors(operation: str, what: str, adapter: LowRank, x: Tensor, experts: int, out: int, width: int) -> None:
    a, b, _ = adapter
    for name, tensor in (("A", a), ("B", b)):
        check_tensor(operation, f"{what}'s {name}", tensor, x)
        if tensor.dtype != x.dtype:
            refuse(operation, f"the rows are {x.dtype} and {what}'s {name} is {tensor.dtype}; convert one with .to()")
    if a.dim() != 3 or b.dim() != 3 or a.shape != (experts, b.shape[2], width) or b.shape != (experts, out, a.shape[1]):
        form = f"A [{experts}, r, {width}] and B [{experts}, {out}, r]"
        refuse(operation, f"{what} must be {form}; got {list(a.shape)} and {list(b.shape)}")


def _adapters(factors: Any, scales: list[float]) -> Adapters:
    up_a, up_b, down_a, down_b = factors
    up = None if up_a is None else LowRank(up_a, up_b, scales[0])
    return Adapters(up, None if down_a is None else LowRank(down_a, down_b, scales[1]))


@operator("low_rank_experts")
def low_rank_experts_operator(
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    scales: list[float],
    layout: LayoutTensors,
    activation: str,
) -> tuple[Tensor, Tensor]:
    weights, adapters = Weights(w1, w2, b1, b2, b2_start), _adapters((up_a, up_b, down_a, down_b), scales)
    return low_rank_forward(x_SM, Layout.of(layout), weight_N, weights, adapters, ACTIVATIONS[activation])


@register_fake(low_rank_experts_operator)
def _(x_SM: Tensor, weight_N: Any, w1: Tensor, w2: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, up_a, _, down_a, _, _, layout, _ = others
    ranks = sum(0 if a is None else a.shape[1] for a in (up_a, down_a))
    hidden_NL = x_SM.new_empty((Layout.of(layout).rows, w1[0].numel() // w1.shape[-1] + ranks))
    return x_SM.new_empty((x_SM.shape[0], w2.shape[1])), hidden_NL


@register_flops(low_rank_experts_operator)
def _(x_SM: Any, weight_N: Any, w1: Any, w2: Any, *others: Any, out_shape: Any, **_: Any) -> int:
    return int(out_shape[1][0] * row_flops(w1, w2, *others[3:7]))


@operator("low_rank_experts_backward")
def low_rank_experts_backward(
    dy_SM: Tensor,
    hidden_NL: Tensor,
    x_SM: Tensor,
    weight_N: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    b2_start: int,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    scales: list[float],
    layout: LayoutTensors,
    activation: str,
    trained: bool,
    needs_dx: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x_SM, weight_N and the four factors; empty tensors for those not computed."""
    weights, adapters = Weights(w1, w2, b1, b2, b2_start), _adapters((up_a, up_b, down_a, down_b), scales)
    given = (dy_SM, x_SM, hidden_NL, Layout.of(layout), weight_N, weights, adapters, ACTIVATIONS[activation])
    dx_SM, dweight_N, grads = low_rank_backward(*given, trained, needs_dx)
    if weight_N is not None and dweight_N is not None:
        dweight_N = dweight_N.to(weight_N.dtype)
    results = (dx_SM, dweight_N, *grads)
    dx, dweight, dup_a, dup_b, ddown_a, ddown_b = (x_SM.new_empty(0) if grad is None else grad for grad in results)
    return dx, dweight, dup_a, dup_b, ddown_a, ddown_b


@register_fake(low_rank_experts_backward)
def _(dy_SM: Tensor, hidden_NL: Any, x_SM: Tensor, weight_N: Any, *others: Any) -> tuple[Tensor, ...]:
    trained, needs_dx = others[-2:]
    given = [x_SM if needs_dx else None, weight_N, *(factor if trained else None for factor in others[5:9])]
    return tuple(x_SM.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in given)


@register_flops(low_rank_experts_backward)
def _(dy_SM: Any, hidden_NL: Any, x_SM: Any, weight_N: Any, w1: Any, w2: Any, *others: Any, **__: Any) -> int:
    *_, trained, needs_dx = others
    up, down = others[3:5], others[5:7]
    # dA' reads W2 and the down adapter; dA also reads the up adapter's B; dx reads W1 and the up adapter's A.
    flops = row_flops(w2, *down, up[1])
    if needs_dx:
        flops += row_flops(w1, up[0])
    return int(hidden_NL[0] * (flops + (row_flops(*up, *down) if trained else 0)))


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, scales, layout, ctx.activation = inputs
    ctx.b2_start, ctx.scales = tensors.pop(6), scales
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *tensors, *layout)


def _gradients(ctx: Any, dy_SM: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SM is None:
        return (None,) * 14
    hidden_NL, *saved = ctx.saved_tensors
    tensors, layout = saved[:10], saved[10:]
    given = (*tensors[:6], ctx.b2_start, *tensors[6:], ctx.scales, layout, ctx.activation)
    trained = any(ctx.needs_input_grad[7:11])
    needs_dx = ctx.needs_input_grad[0]
    dx_SM, dweight_N, *dfactors = low_rank_experts_backward(dy_SM, hidden_NL, *given, trained, needs_dx)
    grads = (grad if needed else None for grad, needed in zip(dfactors, ctx.needs_input_grad[7:11], strict=True))
    frozen = (None,) * 5
    dx = dx_SM if needs_dx else None
    return dx, None if tensors[1] is None else dweight_N, *frozen, *grads, None, None, None


register_gradient(low_rank_experts_operator, _gradients, _save_for_backward)


def low_rank_linear(
    rows_NK: Tensor,
    layout: Layout,
    weight: Tensor,
    adapter: LowRank,
    bias_EO: Tensor | None = None,
    *,
    transposed: bool = True,
) -> Tensor:
    """Compute `grouped_linear` with W + scale·B·A in place of a frozen W, without forming the sum.

    Args:
        adapter: A [E, r, K] and B [E, O, r] in the rows' dtype, independent of `transposed`.
    Saves for backward:
        rows_NK, and N·r elements.
    Raises:
        ConfigError: as `grouped_linear`; factors of wrong shape or dtype; a weight or bias that requires grad.
    """
    name = "low_rank_linear"
    E, O, K = check_linear(name, rows_NK, layout, weight, bias_EO, transposed)  # noqa: E741
    if weight.requires_grad or (bias_EO is not None and bias_EO.requires_grad):
        refuse(name, "the weight and its bias get no gradient here: freeze them with requires_grad_(False)")
    _check_factors(name, "the adapter", adapter, rows_NK, E, O, K)
    a, b, scale = adapter.contiguous()
    out: Tensor = low_rank_linear_operator(rows_NK, weight, bias_EO, a, b, float(scale), transposed, layout.tensors)[0]
    return out


@operator("low_rank_linear")
def low_rank_linear_operator(
    rows_NK: Tensor,
    weight: Tensor,
    bias_EO: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    transposed: bool,
    layout: LayoutTensors,
) -> tuple[Tensor, Tensor]:
    """Return rows·Wᵀ + bias + scale·(rows·Aᵀ)·Bᵀ, [N, O], and rows·Aᵀ, [N, r], to save for backward."""
    return low_rank_product(rows_NK, weight, bias_EO, LowRank(a, b, scale), Layout.of(layout), transposed)


@register_fake(low_rank_linear_operator)
def _(rows_NK: Tensor, weight: Any, bias_EO: Any, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return rows_NK.new_empty((rows_NK.shape[0], b.shape[1])), rows_NK.new_empty((rows_NK.shape[0], a.shape[1]))


@register_flops(low_rank_linear_operator)
def _(rows_NK: Any, weight: Any, bias_EO: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(rows_NK[0] * row_flops(weight, a, b))


@operator("low_rank_linear_backward")
def low_rank_linear_backward(
    dout_NO: Tensor,
    rows_NK: Tensor,
    low_Nr: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    transposed: bool,
    layout: LayoutTensors,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both factors; empty tensors for the factors unless `trained`."""
    row_layout = Layout.of(layout)
    drows_NK, t_Nr = low_rank_input_gradient(dout_NO, weight, LowRank(a, b, scale), row_layout, transposed)
    if not trained:
        return drows_NK, a.new_empty(0), b.new_empty(0)
    return drows_NK, *low_rank_factor_gradients(t_Nr, rows_NK, dout_NO, low_Nr, scale, row_layout)


@register_fake(low_rank_linear_backward)
def _(dout_NO: Tensor, rows_NK: Tensor, low_Nr: Any, weight: Any, a: Tensor, b: Tensor, *others: Any) -> Any:
    da, db = (one.new_empty(one.shape if others[-1] else 0) for one in (a, b))
    return rows_NK.new_empty(rows_NK.shape), da, db


@register_flops(low_rank_linear_backward)
def _(dout_NO: Any, rows_NK: Any, low_Nr: Any, weight: Any, a: Any, b: Any, *others: Any, **_: Any) -> int:
    return int(dout_NO[0] * (row_flops(weight, a, b) + (row_flops(a, b) if others[-1] else 0)))


def _save_linear(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    rows_NK, weight, _, a, b, ctx.scale, ctx.transposed, layout = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows_NK, output[1], weight, a, b, *layout)


def _linear_gradients(ctx: Any, dout_NO: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout_NO is None:
        return (None,) * 8
    rows_NK, low_Nr, weight, a, b, *layout = ctx.saved_tensors
    given = (dout_NO, rows_NK, low_Nr, weight, a, b, ctx.scale, ctx.transposed, layout)
    drows_NK, *dfactors = low_rank_linear_backward(*given, any(ctx.needs_input_grad[3:5]))
    da, db = (grad if needed else None for grad, needed in zip(dfactors, ctx.needs_input_grad[3:5], strict=True))
    return drows_NK, None, None, da, db, None, None, None


register_gradient(low_rank_linear_operator, _linear_gradients, _save_linear)
