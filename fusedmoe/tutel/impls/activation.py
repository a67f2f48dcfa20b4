"""Which of the library's activations a function is: clients hand in `lambda x: F.relu(x)`, kernels want a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_RELU = (F.relu, torch.relu, Tensor.relu)
_SILU = (F.silu,)
_GELU = (F.gelu,)
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


class _Unknown(Exception):
    """The function does something else."""


class _Watch(TorchFunctionMode):
    """Sees the first operation of a function, and lets none run."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x, self.name = x, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if self.name or not args or args[0] is not self.x or len(args) > 1 or options.pop("inplace", False):
            raise _Unknown
        if func in _GELU:
            self.name = _GELUS.get(options.pop("approximate", "none"), "")
        elif func in _RELU or func in _SILU:
            self.name = "relu" if func in _RELU else "silu"
        if not self.name or options:
            raise _Unknown
        self.result = torch.empty(0)
        return self.result


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """A name of `fusedmoe.kernels.activation.ACTIVATIONS` if the function is one operation on its argument, else None.

    The function is called with a tensor that holds nothing, and nothing is computed: at its first operation it is known
    or given up.
    """
    # Made outside, so that the watch does not see it.
    x = torch.empty(0)
    watch = _Watch(x)
    try:
        with watch:
            result = function(x)
    except Exception:
        # Ours, or the function's own at a tensor without elements: it is not one of them.
        return None
    return watch.name if watch.name and result is watch.result else None
