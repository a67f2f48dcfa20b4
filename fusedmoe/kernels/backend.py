"""Choice of the implementation that serves a tensor: Triton on CUDA, plain torch on a CPU.

Under TRITON_INTERPRET=1, set before Python starts, Triton's kernels serve CPU tensors too: that is how they are tested
without a GPU. Nothing here imports Triton, which a machine without a GPU need not have.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

# Kernels take it as a constexpr: the interpreter knows bf16 as storage only, and no inline assembly.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def require_floats(who: str, dtype: object) -> None:
    """Raises `ConfigError` for what is no floating-point dtype of PyTorch, as a dtype's name; None is the default."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{who}: dtype = {dtype!r}; give a floating-point dtype of PyTorch, say torch.bfloat16")


def uses_triton(tensor: Tensor) -> bool:
    """Returns whether the tensor's operations run as Triton kernels."""
    return tensor.is_cuda or INTERPRET


def triton_serves(device: torch.device) -> bool:
    """Returns whether tensors' operations on this device run as Triton kernels."""
    return device.type == "cuda" or INTERPRET


def has_kernels(rows: Tensor) -> bool:
    """Returns whether Triton serves: tensor cores know no float64, and without rows there is nothing to launch."""
    return (rows.is_cuda or INTERPRET) and rows.dtype != torch.float64 and rows.shape[0] > 0
