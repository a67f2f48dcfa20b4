"""Activations of expert networks, with the derivatives used in backward.

A plain activation maps the pre-activation H, [..., H], to A. A gated one (SwiGLU, GeGLU) returns act(g)·u for two
halves g and u, stored as [..., 2, H].

`clamped_swiglu` is the SwiGLU of gpt-oss: A = g·σ(alpha·g)·(u + 1), with g the even columns of H, clamped to at most
`limit`, and u the odd columns, clamped to [−`limit`, `limit`]. The gradient is zero at and beyond a bound, as for
`torch.clamp` from PyTorch 2.15 on. Computes in at least float32 and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from fusedmoe.kernels.backend import has_kernels

_aten = torch.ops.aten
# Bytes per thread of each buffer of `clamped_swiglu`, which keep all of them in cache.
_SLICE_BYTES = 1 << 17


@dataclass(frozen=True)
class Activation:
    """An activation and its derivative as PyTorch out-variants.

    `forward(x, out=a)` writes act(x), and `backward(grad, x, grad_input=dx)` writes grad·act'(x).
    """

    name: str
    gated: bool
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]

    @property
    def num_projections(self) -> int:
        return 2 if self.gated else 1

    def apply(self, h: Tensor, a: Tensor) -> None:
        """Write the activation of h, [N, H] or gated [N, 2·H], to `a`, [N, H]."""
        if self.gated:
            g, u = h.split(a.shape[1], 1)
            self.forward(g, out=a)
            a.mul_(u)
        else:
            self.forward(h, out=a)

    def apply_backward(self, h: Tensor, da: Tensor, a: Tensor | None, dh: Tensor | None, act: Tensor) -> None:
        """Write the activation to `a` and the pre-activation gradient to `dh`, if given; `act` is scratch like `da`."""
        if self.gated:
            g, u = h.split(act.shape[1], 1)
            self.forward(g, out=act)
            if a is not None:
                torch.mul(act, u, out=a)
            if dh is not None:
                dg, du = dh.split(act.shape[1], 1)
                torch.mul(da, act, out=du)
                torch.mul(da, u, out=act)
                self.backward(act, g, grad_input=dg)
        else:
            if a is not None:
                self.forward(h, out=a)
            if dh is not None:
                self.backward(da, h, grad_input=dh)


_silu = _aten.silu.out, _aten.silu_backward.grad_input
_gelu = _aten.gelu.out, _aten.gelu_backward.grad_input
_gelu_tanh = tuple(partial(operation, approximate="tanh") for operation in _gelu)
_relu = partial(torch.clamp_min, min=0), partial(_aten.threshold_backward.grad_input, threshold=0)

ACTIVATIONS = {
    "swiglu": Activation("swiglu", True, *_silu),
    "geglu": Activation("geglu", True, *_gelu),
    "silu": Activation("silu", False, *_silu),
    "gelu": Activation("gelu", False, *_gelu),
    "gelu_tanh": Activation("gelu_tanh", False, *_gelu_tanh),
    "relu": Activation("relu", False, *_relu),
}


def define_activation(name: str, h: Tensor) -> Tensor:
    """Differentiable reference: [..., (2,) H] -> [..., H]."""
    if ACTIVATIONS[name].gated:
        g, u = h.unbind(-2)
        return define_activation({"swiglu": "silu", "geglu": "gelu"}[name], g) * u
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(h, approximate="tanh")
    activation: Callable[[Tensor], Tensor] = getattr(torch.nn.functional, name)
    return activation(h)


def rows_in_cache(row_bytes: int, slice_bytes: int) -> int:
    """Return the number of rows of `row_bytes` that fit in the caches of all threads, `slice_bytes` per thread."""
    return max(1, slice_bytes * torch.get_num_threads() // max(1, row_bytes))


def define_clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    # `clamp` with the same gradient at a bound in all PyTorch versions.
    g_NI, u_NI = hardtanh(h_NH[..., ::2], -math.inf, limit), hardtanh(h_NH[..., 1::2], -limit, limit)
    return g_NI * torch.sigmoid(alpha * g_NI) * (u_NI + 1)


def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """Apply the clamped SwiGLU: [N, 2·I] -> [N, I] in the same dtype; any strides."""
    h_NH = h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import activation as kernels

        return kernels.clamped_swiglu(h_NH, alpha, limit)
    a_NI = h_NH.new_empty((h_NH.shape[0], h_NH.shape[1] // 2))
    for rows, (g, u, glu) in _half_slices(h_NH, 1):
        g.clamp_(max=limit)
        torch.mul(g, alpha, out=glu).sigmoid_().mul_(g)
        torch.mul(u.clamp_(-limit, limit).add_(1), glu, out=a_NI[rows])
    return a_NI


def clamped_swiglu_backward(da_NI: Tensor, h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    da_NI, h_NH = da_NI.contiguous(), h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import activation as kernels

        return kernels.clamped_swiglu_backward(da_NI, h_NH, alpha, limit)
    dh_NH = h_NH.new_empty(h_NH.shape)
    for rows, (g, u, sigma, slope, inside) in _half_slices(h_NH, 3):
        da, dh = da_NI[rows], dh_NH[rows].view(*g.shape, 2)
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


def _half_slices(h_NH: Tensor, num_scratch: int) -> Iterator[tuple[slice, list[Tensor]]]:
    N, I = h_NH.shape[0], h_NH.shape[1] // 2  # noqa: E741
    dtype = torch.promote_types(h_NH.dtype, torch.float32)
    storage: list[Tensor] = []
    step = rows_in_cache(I * dtype.itemsize, _SLICE_BYTES)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        size = rows.stop - start
        storage = storage or [h_NH.new_empty((size, I), dtype=dtype) for _ in range(2 + num_scratch)]
        buffers = [buffer[:size] for buffer in storage]
        # De-interleave once; all later passes are contiguous.
        pairs = h_NH[rows].view(size, I, 2)
        for half in range(2):
            buffers[half].copy_(pairs[..., half])
        yield rows, buffers
