"""Gradients that are synchronised more than once: each call must leave the result of the call before it as it is.

Synchronisation divides the sum over `n` copies by a divisor `d`. The result `g` is equal on all copies, and the next
call would make `g·n/d` of it. So `g` is turned back into this rank's summand, `g·d/n`, before a backward pass adds to
it. For replicated parameters d = n; for experts d/n is the number of ranks that split them.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedmoe.compat.torch import version_of

# By gradient: its version after synchronisation, and d/n.
_synchronised: Any = WeakIdKeyDictionary()
# Parameters whose hook restores the summand.
_hooked: Any = WeakIdKeyDictionary()


def note_synchronised(parameter: nn.Parameter, factor: float) -> None:
    """Note that the gradient of a parameter is synchronised, and by which factor it becomes a summand again."""
    gradient = parameter.grad
    if gradient is None or factor == 1:
        return
    _synchronised[gradient] = version_of(gradient), factor
    if parameter.requires_grad and parameter not in _hooked:
        _hooked[parameter] = True
        own = ref(parameter)  # a hook that held the parameter would keep it
        parameter.register_hook(lambda _: _restore(own()))


def note_scaled(gradient: Tensor) -> None:
    """Note that a gradient has been scaled alike on all ranks, and is still synchronised if it was before."""
    if gradient in _synchronised:
        _synchronised[gradient] = version_of(gradient), _synchronised[gradient][1]


def restore_summand(parameter: nn.Parameter) -> bool:
    """Turn a synchronised gradient that no backward pass has added to into this rank's summand.

    Returns:
        False where the gradient has been written in place since, outside of backward passes: it may be this rank's own
        or equal on all ranks. Zeros are both.
    """
    gradient = parameter.grad
    if gradient is None or gradient not in _synchronised:
        return True
    if version_of(gradient) != _synchronised[gradient][0] and bool(gradient.any()):
        return False
    _restore(parameter)
    return True


@torch.no_grad()
def _restore(parameter: Tensor | None) -> None:
    gradient = None if parameter is None else parameter.grad
    if gradient is not None and (noted := _synchronised.pop(gradient, None)) is not None:
        gradient.mul_(noted[1])
