"""Activations of expert networks, with the derivative that the experts' backward needs.

An activation maps the pre-activation H to A. A gated one (SwiGLU and its kin) reads two halves, g and u, of H stored as
[..., 2, H] and returns act(g)·u; a plain one reads [..., H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_aten = torch.ops.aten


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
    return max(1, slice_bytes * torch.get_num_threads() // max(1, row_bytes))
