"""`jit`, which makes the library's kernels; the functions that they are made of are `triton.jit`'s.

Beside what `triton.jit` does, a launch goes to the GPU that its tensors are on, whichever is current, and code for
Hopper and later has its fences (`fence.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels import fence
from fusedmoe.kernels.backend import INTERPRET


class Kernel(JITFunction):
    """Launches where its first tensor is."""

    def run(self, *args: Any, **keywords: Any) -> Any:
        for argument in args:
            tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                with torch.cuda.device(tensor.device):
                    return super().run(*args, **keywords)
        return super().run(*args, **keywords)


class _FencedKernel(fence.Fenced, Kernel):
    pass


def jit(function: Any = None, **options: Any) -> Any:
    """A decorator, with or without options of `triton.jit`.

    Raises:
        ConfigError: a Triton too old to be told of the fence.
    """
    if function is None:
        return partial(jit, **options)
    if INTERPRET:
        return triton.jit(function, **options)
    if fence.VERSION < (3, 6):
        raise ConfigError(f"these kernels need Triton 3.6 or newer, and this is {triton.__version__}: update it")
    return (_FencedKernel if fence.LEFT_OUT else Kernel)(function, **options)
