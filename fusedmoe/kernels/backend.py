"""Backend choice for a tensor: Triton on CUDA, plain PyTorch on CPU.

With TRITON_INTERPRET=1, set before Python starts, Triton kernels also run on CPU tensors, for tests. Does not import
Triton, which CPU-only installations may lack.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

# A constexpr of kernels: the interpreter supports bf16 as storage only, and no inline assembly.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def require_float_dtype(who: str, dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{who}: dtype = {dtype!r}; give a floating-point dtype of PyTorch, say torch.bfloat16")


def uses_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda or INTERPRET


def device_uses_triton(device: torch.device) -> bool:
    return device.type == "cuda" or INTERPRET


def has_kernels(rows: Tensor) -> bool:
    """Return whether Triton kernels apply: not to float64, which tensor cores lack, nor to zero rows."""
    return (rows.is_cuda or INTERPRET) and rows.dtype != torch.float64 and rows.shape[0] > 0
