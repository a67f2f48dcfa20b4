"""Differentiable functions of sorted rows for custom expert networks: grouped linear maps and clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedmoe.autograd.checks import check_floats, check_layout, check_rows, check_tensor, refuse
from fusedmoe.kernels import activation
from fusedmoe.kernels.derivatives import operator, register_fake, register_flops, register_gradient
from fusedmoe.kernels.grouped import grouped_dweight, grouped_product
from fusedmoe.kernels.layout import Layout, LayoutTensors


def grouped_linear(
    rows_NK: Tensor, layout: Layout, weight: Tensor, bias_EO: Tensor | None = None, *, transposed: bool = True
) -> Tensor:
    """Multiply each row by its expert's matrix and add its expert's bias: [N, K] -> [N, O]; zeros in padding rows.

    Used between `permute` and `unpermute`, like `torch.nn.functional.linear` in a dense network.

    Args:
        rows_NK: rows sorted by expert, floating point, any strides.
        weight: [E, O, K] as in `torch.nn.Linear`, or [E, K, O] if not `transposed`, in the rows' dtype. GPUs copy a
            non-contiguous weight.
        bias_EO: [E, O], or None.
    Saves for backward:
        rows_NK if the weight requires grad; the weight is referenced.
    Raises:
        ConfigError: inconsistent shapes, dtypes or devices.
    """
    check_linear("grouped_linear", rows_NK, layout, weight, bias_EO, transposed)
    out: Tensor = grouped_linear_operator(rows_NK, weight, bias_EO, transposed, layout.tensors)
    return out


def check_linear(
    operation: str, rows_NK: Any, layout: Any, weight: Any, bias_EO: Any, transposed: bool
) -> tuple[int, int, int]:
    """Check the arguments of a grouped linear map and return E, O and K."""
    check_layout(operation, layout)
    check_rows(operation, "rows_NK", rows_NK, layout.rows, layout.row_SK)
    check_floats(operation, "rows_NK", rows_NK)
    check_tensor(operation, "weight", weight, rows_NK)
    E, K, O = layout.experts, rows_NK.shape[1], weight.shape[1 if transposed else -1] if weight.dim() > 1 else 0  # noqa: E741
    if weight.shape != ((E, O, K) if transposed else (E, K, O)):
        form = f"[{E}, O, {K}]" if transposed else f"[{E}, {K}, O]"
        refuse(operation, f"weight must be {form}, got {list(weight.shape)}")
    if bias_EO is not None:
        check_tensor(operation, "bias_EO", bias_EO, rows_NK)
        if bias_EO.shape != (E, O):
            refuse(operation, f"bias_EO must be [{E}, {O}], got {list(bias_EO.shape)}")
    for name, tensor in (("weight", weight), ("bias_EO", bias_EO)):
        if tensor is not None and tensor.dtype != rows_NK.dtype:
            refuse(operation, f"the rows are {rows_NK.dtype} and {name} is {tensor.dtype}; convert one with .to()")
    return E, O, K


@operator("grouped_linear")
def grouped_linear_operator(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, transposed: bool, layout: LayoutTensors
) -> Tensor:
    return grouped_product(rows_NK, weight, bias_EO, Layout.of(layout), transposed)


@register_fake(grouped_linear_operator)
def _(rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, transposed: bool, layout: LayoutTensors) -> Tensor:
    return rows_NK.new_empty((rows_NK.shape[0], weight.shape[1 if transposed else 2]))


@register_flops(grouped_linear_operator)
def _(rows_NK: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * int(rows_NK[0] * weight[1] * weight[2])


@operator("grouped_linear_backward")
def grouped_linear_backward(
    dout_NO: Tensor,
    rows_NK: Tensor | None,
    weight: Tensor | None,
    biased: bool,
    transposed: bool,
    layout: LayoutTensors,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows, the weights and the bias; empty tensors for those not computed.

    The rows' gradient needs `weight`, the weights' gradient `rows_NK`, and the bias' gradient `biased`.
    """
    row_layout = Layout.of(layout)
    drows_NK, dweight, dbias_EO = (dout_NO.new_empty(0) for _ in range(3))
    if weight is not None:
        drows_NK = grouped_product(dout_NO, weight, None, row_layout, not transposed)
    if rows_NK is not None:
        left, right = (dout_NO, rows_NK) if transposed else (rows_NK, dout_NO)
        dweight = grouped_dweight(left, right, row_layout)
    if biased:
        # The sum over an expert's rows is a product with a column of ones.
        dbias_EO = grouped_dweight(dout_NO.new_ones((row_layout.rows, 1)), dout_NO, row_layout)[:, 0].contiguous()
    return drows_NK, dweight, dbias_EO


@register_fake(grouped_linear_backward)
def _(
    dout_NO: Tensor, rows_NK: Any, weight: Any, biased: bool, transposed: bool, layout: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, outputs, experts = *dout_NO.shape, Layout.of(layout).experts
    drows: Any = 0 if weight is None else (rows, weight.shape[2 if transposed else 1])
    dweight: Any = 0
    if rows_NK is not None:
        width = rows_NK.shape[1]
        dweight = (experts, outputs, width) if transposed else (experts, width, outputs)
    dbias: Any = (experts, outputs) if biased else 0
    return dout_NO.new_empty(drows), dout_NO.new_empty(dweight), dout_NO.new_empty(dbias)


@register_flops(grouped_linear_backward)
def _(dout_NO: Any, rows_NK: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    drows, dweight, _ = out_shape
    columns = (0 if weight is None else drows[1]) + (0 if rows_NK is None else dweight[1] * dweight[2] // dout_NO[1])
    return 2 * int(dout_NO[0] * dout_NO[1] * columns)


def _save_rows(ctx: Any, inputs: Any, output: Tensor) -> None:
    rows_NK, weight, _, ctx.transposed, layout = inputs
    needs_rows_grad, needs_weight_grad, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows_NK if needs_weight_grad else None, weight if needs_rows_grad else None, *layout)


def _linear_gradients(ctx: Any, dout_NO: Tensor) -> tuple[Tensor | None, ...]:
    rows_NK, weight, *layout = ctx.saved_tensors
    needs_grads = ctx.needs_input_grad[:3]
    grads = grouped_linear_backward(dout_NO, rows_NK, weight, needs_grads[2], ctx.transposed, layout)
    return *[grad if needed else None for grad, needed in zip(grads, needs_grads, strict=True)], None, None


register_gradient(grouped_linear_operator, _linear_gradients, _save_rows)


def clamped_swiglu(h_NH: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Clamped SwiGLU of gpt-oss, [N, 2·I] -> [N, I]: g·σ(alpha·g)·(u + 1), with g the even and u the odd columns.

    g is clamped to at most `limit`, u to [−limit, limit]. Accepts any strides. Computes in at least float32 and returns
    the dtype of h_NH, which is saved for backward.

    Raises:
        ConfigError: an odd number of columns, a non-floating dtype, or a limit <= 0.
    """
    check_floats("clamped_swiglu", "h_NH", h_NH)
    if h_NH.dim() != 2 or h_NH.shape[1] % 2:
        refuse("clamped_swiglu", f"h_NH must be [N, 2·I], got {list(h_NH.shape)}")
    if not limit > 0:
        refuse("clamped_swiglu", f"limit must be positive, got {limit!r}")
    out: Tensor = clamped_swiglu_operator(h_NH, float(alpha), float(limit))
    return out


@operator("clamped_swiglu")
def clamped_swiglu_operator(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return activation.clamped_swiglu(h_NH, alpha, limit)


@register_fake(clamped_swiglu_operator)
def _(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))


@operator("clamped_swiglu_backward")
def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return activation.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)


@register_fake(clamped_swiglu_backward)
def _(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty(h_NH.shape)


def _save_pre_activation(ctx: Any, inputs: Any, output: Tensor) -> None:
    h_NH, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(h_NH)


def _clamped_swiglu_gradients(ctx: Any, da_NI: Tensor) -> tuple[Tensor, None, None]:
    (h_NH,) = ctx.saved_tensors
    return clamped_swiglu_backward(da_NI, h_NH, ctx.alpha, ctx.limit), None, None


register_gradient(clamped_swiglu_operator, _clamped_swiglu_gradients, _save_pre_activation)
