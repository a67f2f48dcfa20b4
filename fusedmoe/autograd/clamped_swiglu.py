"""SwiGLU with bounds as one differentiable function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedmoe.autograd.checks import check_floats, refuse
from fusedmoe.kernels import clamped_swiglu as kernels
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient


def clamped_swiglu(h_NH: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[N, 2·I] -> [N, I]: g·σ(alpha·g)·(u + 1), of g and u the even and the odd columns (the activation of gpt-oss).

    g is at most `limit`, and u between −`limit` and `limit`. Between two `grouped_linear` it makes gpt-oss's experts.

    Args:
        h_NH: rows, floating point, any strides; computed in at least float32.
        limit: a positive number.
    Returns:
        In the dtype of h_NH.
    Saves for backward:
        h_NH.
    Raises:
        ConfigError: rows that cannot be halved, other dtypes, a limit that is no bound.
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
    return kernels.clamped_swiglu(h_NH, alpha, limit)


@register_fake(clamped_swiglu_operator)
def _(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))


@operator("clamped_swiglu_backward")
def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return kernels.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)


@register_fake(clamped_swiglu_backward)
def _(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    return h_NH.new_empty(h_NH.shape)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    h_NH, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(h_NH)


def _gradients(ctx: Any, da_NI: Tensor) -> tuple[Tensor, None, None]:
    (h_NH,) = ctx.saved_tensors
    return clamped_swiglu_backward(da_NI, h_NH, ctx.alpha, ctx.limit), None, None


register_gradient(clamped_swiglu_operator, _gradients, _keep)
