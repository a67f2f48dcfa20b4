"""SwiGLU with bounds, as gpt-oss has it: two interleaved halves of each row in, their product out.

With g and u the even and the odd columns of H, g at most `limit` and u between −`limit` and `limit`,

    A = g·σ(alpha·g) · (u + 1)

Contract: tensors in, tensors out; no autograd. Products are computed in at least float32 and rounded once. Definition:
`define_clamped_swiglu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.workspace import empty

# Bytes of each buffer, for each thread: all of them stay in its cache.
_SLICE_BYTES = 1 << 17


def define_clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I], in plain differentiable torch."""
    g_NI, u_NI = h_NH[..., ::2].clamp(max=limit), h_NH[..., 1::2].clamp(-limit, limit)
    return g_NI * torch.sigmoid(alpha * g_NI) * (u_NI + 1)


def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I] in the same dtype; any strides."""
    h_NH = h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import clamped_swiglu as kernels

        return kernels.clamped_swiglu(h_NH, alpha, limit)
    a_NI = empty(h_NH, (h_NH.shape[0], h_NH.shape[1] // 2))
    buffers = _buffers(a_NI, 3)
    for rows in _slices(a_NI):
        g, u, glu = (buffer[: rows.stop - rows.start] for buffer in buffers)
        _halves(h_NH[rows], g, u)
        g.clamp_(max=limit)
        torch.mul(g, alpha, out=glu).sigmoid_().mul_(g)
        torch.mul(u.clamp_(-limit, limit).add_(1), glu, out=a_NI[rows])
    return a_NI


def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of h_NH, from that of the result and h_NH; none where a bound holds."""
    da_NI, h_NH = da_NI.contiguous(), h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import clamped_swiglu as kernels

        return kernels.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)
    dh_NH = empty(h_NH, h_NH.shape)
    buffers = _buffers(da_NI, 5)
    for rows in _slices(da_NI):
        g, u, sigma, slope, inside = (buffer[: rows.stop - rows.start] for buffer in buffers)
        da, dh = da_NI[rows], dh_NH[rows].view(*g.shape, 2)
        _halves(h_NH[rows], g, u)
        torch.le(torch.abs(u, out=inside), limit, out=inside)
        u.clamp_(-limit, limit).add_(1)
        torch.le(g, limit, out=slope)
        inside.mul_(da)
        u.mul_(da).mul_(slope)
        g.clamp_(max=limit)
        torch.mul(g, alpha, out=slope)
        torch.sigmoid(slope, out=sigma)
        torch.mul(inside.mul_(g), sigma, out=dh[..., 1])
        slope.addcmul_(slope, sigma, value=-1).add_(1).mul_(sigma)  # σ·(1 + x·(1 − σ))
        torch.mul(u, slope, out=dh[..., 0])
    return dh_NH


def _halves(h_NH: Tensor, g: Tensor, u: Tensor) -> None:
    pairs = h_NH.view(*g.shape, 2)
    g.copy_(pairs[..., 0])
    u.copy_(pairs[..., 1])


def _buffers(like_NI: Tensor, count: int) -> list[Tensor]:
    """Of a slice, in at least float32."""
    dtype = torch.promote_types(like_NI.dtype, torch.float32)
    return [like_NI.new_empty((_rows(like_NI), like_NI.shape[1]), dtype=dtype) for _ in range(count)]


def _slices(like_NI: Tensor) -> Iterator[slice]:
    rows, count = _rows(like_NI), like_NI.shape[0]
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _rows(like_NI: Tensor) -> int:
    """Of a slice, at most those that there are."""
    rows = _SLICE_BYTES * torch.get_num_threads() // (4 * max(1, like_NI.shape[1]))
    return max(1, min(rows, like_NI.shape[0]))
