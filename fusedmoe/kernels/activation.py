"""Activations of expert networks, with the derivative that the experts' backward needs.

An activation maps the pre-activation H to A. A gated one (SwiGLU and its kin) reads two halves, g and u, of H stored as
[..., 2, H] and returns act(g)·u; a plain one reads [..., H].

One is an operation of its own, SwiGLU with bounds, as gpt-oss has it. With g and u the even and the odd columns of H,
g at most `limit` and u between −`limit` and `limit`,

    A = g·σ(alpha·g) · (u + 1)

A number on a bound has no gradient, like one beyond it. `torch.clamp` has the same from PyTorch 2.15 on; before, it
passed the gradient there. Products are computed in at least float32 and rounded once. Definition:
`define_clamped_swiglu`.
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
# Bytes of each buffer of `clamped_swiglu`, for each thread: all of them stay in its cache.
_SLICE_BYTES = 1 << 17


@dataclass(frozen=True)
class Activation:
    """An activation with its derivative, as PyTorch's own operations, called without a function of ours around them.

    Attributes:
        name: its key in `ACTIVATIONS`.
        gated: H holds two halves.
        forward: `forward(x, out=a)` writes act(x).
        backward: `backward(grad, x, grad_input=dx)` writes grad·act'(x).
    """

    name: str
    gated: bool
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1


_silu = _aten.silu.out, _aten.silu_backward.grad_input
_gelu = _aten.gelu.out, _aten.gelu_backward.grad_input
_gelu_tanh = tuple(partial(operation, approximate="tanh") for operation in _gelu)
_relu = partial(torch.clamp_min, min=0), partial(_aten.threshold_backward.grad_input, threshold=0)

_TABLE = (
    Activation("swiglu", True, *_silu),
    Activation("geglu", True, *_gelu),
    Activation("silu", False, *_silu),
    Activation("gelu", False, *_gelu),
    Activation("gelu_tanh", False, *_gelu_tanh),
    Activation("relu", False, *_relu),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _TABLE}


def define_activation(name: str, h: Tensor) -> Tensor:
    """Defines an activation in plain differentiable torch: [..., (2,) H] -> [..., H]."""
    functional = torch.nn.functional
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
    if name in plain:
        return plain[name](h)
    g, u = h.unbind(-2)
    return plain[{"swiglu": "silu", "geglu": "gelu"}[name]](g) * u


def cached_rows(row_bytes: int, slice_bytes: int) -> int:
    """Returns how many rows of that size all threads' caches hold together, `slice_bytes` for each thread."""
    # Each thread works on its share of the rows, out of its own cache.
    return max(1, slice_bytes * torch.get_num_threads() // max(1, row_bytes))


def define_clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I], in plain differentiable torch."""
    # As `clamp`, but with the same gradient on a bound in all versions of PyTorch.
    g_NI, u_NI = hardtanh(h_NH[..., ::2], -math.inf, limit), hardtanh(h_NH[..., 1::2], -limit, limit)
    return g_NI * torch.sigmoid(alpha * g_NI) * (u_NI + 1)


def clamped_swiglu(h_NH: Tensor, alpha: float, limit: float) -> Tensor:
    """[N, 2·I] -> [N, I] in the same dtype; any strides."""
    h_NH = h_NH.contiguous()
    if has_kernels(h_NH):
        from fusedmoe.kernels.triton import activation as kernels

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
        from fusedmoe.kernels.triton import activation as kernels

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
