"""Activations of expert networks, with the derivative that the experts' backward needs.

An activation maps the pre-activation H to A. A gated one (SwiGLU and its kin) reads two halves, g and u, of H stored as
[..., 2, H] and returns act(g)·u; a plain one reads [..., H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """`forward(x, out)` writes act(x); `backward(grad, x, out)` writes grad·act'(x). `gated`: H holds two halves."""

    name: str
    gated: bool
    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1


def _silu(x: Tensor, out: Tensor) -> Tensor:
    return _aten.silu.out(x, out=out)


def _silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(grad, x, grad_input=out)


def _gelu(x: Tensor, out: Tensor) -> Tensor:
    return _aten.gelu.out(x, out=out)


def _gelu_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.gelu_backward.grad_input(grad, x, grad_input=out)


def _gelu_tanh(x: Tensor, out: Tensor) -> Tensor:
    return _aten.gelu.out(x, approximate="tanh", out=out)


def _gelu_tanh_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out)


def _relu(x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


def _relu_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(grad, x, 0, grad_input=out)


_TABLE = (
    Activation("swiglu", True, _silu, _silu_backward),
    Activation("geglu", True, _gelu, _gelu_backward),
    Activation("silu", False, _silu, _silu_backward),
    Activation("gelu", False, _gelu, _gelu_backward),
    Activation("gelu_tanh", False, _gelu_tanh, _gelu_tanh_backward),
    Activation("relu", False, _relu, _relu_backward),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _TABLE}


def define_activation(name: str, h: Tensor) -> Tensor:
    """What an activation computes, in plain differentiable torch: [..., (2,) H] -> [..., H]."""
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


def cached_slices(rows: int, row_bytes: int, slice_bytes: int) -> Iterator[slice]:
    """Of so many rows of that size: some that all threads' caches hold together, `slice_bytes` for each thread."""
    step = max(1, slice_bytes * torch.get_num_threads() // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
