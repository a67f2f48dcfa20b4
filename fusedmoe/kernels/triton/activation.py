"""Clamped SwiGLU over interleaved halves, see `fusedmoe.kernels.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.grouped.device import sigmoid
from fusedmoe.kernels.triton.jit import jit

BLOCK = 1024


@triton.jit
def _load(h_ptr, first, count, BLOCK: tl.constexpr):
    offset = 2 * first + tl.arange(0, 2 * BLOCK)
    return tl.load(h_ptr + offset, mask=offset // 2 < count, other=0.0).to(tl.float32).reshape(BLOCK, 2).split()


@triton.jit
def _bounded(g, u, limit):
    """Clamp like `torch.clamp`: NaN stays NaN."""
    g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
    return g, tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)


@jit(do_not_specialize=["count", "alpha", "limit"])
def clamped_swiglu_kernel(h_ptr, a_ptr, count, alpha, limit, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    g, u = _load(h_ptr, first, count, BLOCK)
    g, u = _bounded(g, u, limit)
    offset = first + tl.arange(0, BLOCK)
    a = g * sigmoid(alpha * g) * (u + 1.0)
    tl.store(a_ptr + offset, a.to(a_ptr.dtype.element_ty), mask=offset < count)


@jit(do_not_specialize=["count", "alpha", "limit"])
def clamped_swiglu_backward_kernel(da_ptr, h_ptr, dh_ptr, count, alpha, limit, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    g, u = _load(h_ptr, first, count, BLOCK)
    offset = first + tl.arange(0, BLOCK)
    da = tl.load(da_ptr + offset, mask=offset < count, other=0.0).to(tl.float32)
    dg, du = tl.where(g < limit, da, 0.0), tl.where(tl.abs(u) < limit, da, 0.0)
    g, u = _bounded(g, u, limit)
    x = alpha * g
    s = sigmoid(x)
    dg *= (u + 1.0) * s * (1.0 + x * (1.0 - s))
    du *= g * s
    both = 2 * first + tl.arange(0, 2 * BLOCK)
    dh = tl.join(dg, du).reshape(2 * BLOCK)
    tl.store(dh_ptr + both, dh.to(dh_ptr.dtype.element_ty), mask=both // 2 < count)


def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    a_NI = h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))
    if a_NI.numel():
        grid = (triton.cdiv(a_NI.numel(), BLOCK),)
        clamped_swiglu_kernel[grid](h_NH, a_NI, a_NI.numel(), alpha, limit, BLOCK=BLOCK, num_warps=4)
    return a_NI


def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    dh_NH, count = torch.empty_like(h_NH), da_NI.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        clamped_swiglu_backward_kernel[grid](da_NI, h_NH, dh_NH, count, alpha, limit, BLOCK=BLOCK, num_warps=4)
    return dh_NH
