"""Repeated gradient synchronisation: a second call must not change gradients that are already synchronised.

Synchronisation replaces n summands by their sum over a divisor d. Another call would turn the result `g`, equal on all
replicas, into `g·n/d`. Therefore `g` is converted back to a summand `g·d/n` before a backward pass accumulates into it.
For replicated parameters d = n; for experts d/n is the number of ranks that split them.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedmoe.compat.torch import tensor_version

# By gradient: its version after synchronisation, and d/n.
_synchronised: Any = WeakIdKeyDictionary()
# Parameters with a hook that restores the summand.
_hooked: Any = WeakIdKeyDictionary()


def note_synchronised(parameter: nn.Parameter, factor: float) -> None:
    """Record that a gradient is synchronised; `factor` = d/n converts it back to a summand."""
    gradient = parameter.grad
    if gradient is None or factor == 1:
        return
    _synchronised[gradient] = tensor_version(gradient), factor
    if parameter.requires_grad and parameter not in _hooked:
        _hooked[parameter] = True
        own = ref(parameter)  # a strong reference in the hook would keep the parameter alive
        parameter.register_hook(lambda _: _restore(own()))


def note_scaled(gradient: Tensor) -> None:
    """Record that a gradient was scaled equally on all ranks and remains synchronised."""
    if gradient in _synchronised:
        _synchronised[gradient] = tensor_version(gradient), _synchronised[gradient][1]


def restore_summand(parameter: nn.Parameter) -> bool:
    """Convert a synchronised gradient that no backward pass has modified back to this rank's summand.

    Return False if the gradient is nonzero and was written in place outside of a backward pass.
    """
    gradient = parameter.grad
    if gradient is None or gradient not in _synchronised:
        return True
    if tensor_version(gradient) != _synchronised[gradient][0] and bool(gradient.any()):
        return False
    _restore(parameter)
    return True


@torch.no_grad()
def _restore(parameter: Tensor | None) -> None:
    gradient = None if parameter is None else parameter.grad
    if gradient is not None and (noted := _synchronised.pop(gradient, None)) is not None:
        gradient.mul_(noted[1])
