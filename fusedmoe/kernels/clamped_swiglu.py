"""SwiGLU with bounds, as gpt-oss has it: two interleaved halves of each row in, their product out.

With g and u the even and the odd columns of H, g at most `limit` and u between −`limit` and `limit`,

    A = g·σ(alpha·g) · (u + 1)

A number on a bound has no gradient, like one beyond it. `torch.clamp` has the same from PyTorch 2.15 on; before, it
passed the gradient there.

Contract: tensors in, tensors out; no autograd. Products are computed in at least float32 and rounded once. Definition:
`define_clamped_swiglu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from fusedmoe.kernels.activation import cached_rows
from fusedmoe.kernels.backend import has_kernels

# Bytes of each buffer, for each thread: all of them stay in its cache.
_SLICE_BYTES = 1 << 17


def define_clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I], in plain differentiable torch."""
    # As `clamp`, but with the same gradient on a bound in all versions of PyTorch.
    g_NI, u_NI = hardtanh(h_NH[..., ::2], -math.inf, limit), hardtanh(h_NH[..., 1::2], -limit, limit)
    return g_NI * torch.sigmoid(alpha * g_NI) * (u_NI + 1)


def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I] in the same dtype; any strides."""
    h_NH = h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import clamped_swiglu as kernels

        return kernels.clamped_swiglu(h_NH, alpha, limit)
    a_NI = h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))
    for rows, (g, u, glu) in _halves(h_NH, 1):
        g.clamp_(max=limit)
        torch.mul(g, alpha, out=glu).sigmoid_().mul_(g)
        torch.mul(u.clamp_(-limit, limit).add_(1), glu, out=a_NI[rows])
    return a_NI


def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of h_NH, from that of the result and h_NH; none on a bound or beyond."""
    da_NI, h_NH = da_NI.contiguous(), h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import clamped_swiglu as kernels

        return kernels.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)
    dh_NH = h_NH.new_empty(h_NH.shape)
    for rows, (g, u, sigma, slope, inside) in _halves(h_NH, 3):
        da, dh = da_NI[rows], dh_NH[rows].view(*g.shape, 2)
        # 1 where a number is inside its bounds, 0 elsewhere: no gradient goes to a number on a bound.
        torch.lt(torch.abs(u, out=inside), limit, out=inside)
        u.clamp_(-limit, limit).add_(1)
        torch.lt(g, limit, out=slope)
        inside.mul_(da)
        u.mul_(da).mul_(slope)
        g.clamp_(max=limit)
        torch.mul(g, alpha, out=slope)
        torch.sigmoid(slope, out=sigma)
        torch.mul(inside.mul_(g), sigma, out=dh[..., 1])
        slope.addcmul_(slope, sigma, value=-1).add_(1).mul_(sigma)  # σ·(1 + x·(1 − σ))
        torch.mul(u, slope, out=dh[..., 0])
    return dh_NH


def _halves(h_NH: Tensor, more: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields slices of rows, with their g, their u and `more` buffers, in at least float32 and used again each time."""
    N, I = h_NH.shape[0], h_NH.shape[1] // 2  # noqa: E741
    dtype = torch.promote_types(h_NH.dtype, torch.float32)
    made: list[Tensor] = []
    step = cached_rows(I * dtype.itemsize, _SLICE_BYTES)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        size = rows.stop - start
        made = made or [h_NH.new_empty((size, I), dtype=dtype) for _ in range(2 + more)]  # the first slice is largest
        buffers = [buffer[:size] for buffer in made]
        # The halves are apart in memory from here on: strided reads once, contiguous work afterwards.
        pairs = h_NH[rows].view(size, I, 2)
        for half in range(2):
            buffers[half].copy_(pairs[..., half])
        yield rows, buffers
