"""Backend choice for a tensor: Triton on CUDA, plain PyTorch on CPU.

With TRITON_INTERPRET=1, set before Python starts, Triton kernels also run on CPU tensors, for tests. Does not import
Triton, which CPU-only installations may lack.

GPU generations select a table of GEMM tile sizes by tensor-core instruction and shared memory per block. Hopper (wgmma)
and data-centre Blackwell (tcgen05) use their table if a block has enough shared memory for its tiles. All other
devices, such as sm_120 (99 KB per block), use the sm_80 table, whose mma instruction every GPU supports.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

# A constexpr of kernels: the interpreter supports bf16 as storage only, and no inline assembly.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

Capability = tuple[int, int]

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
# Maximum shared memory in bytes per block of a table's tiles, checked by ahead-of-time compilation.
TABLE_SHARED_BYTES = {AMPERE: 101_376, HOPPER: 232_448, BLACKWELL: 232_448}
_TABLE_OF_MAJOR = {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}


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


def generation(capability: Capability, shared_bytes: int) -> Capability:
    """Return the generation whose GEMM tiles fit a device with `shared_bytes` of shared memory per block.

    Raises:
        ConfigError: the device cannot run the kernels.
    """
    own = _TABLE_OF_MAJOR.get(capability[0], AMPERE)
    for table in (own, AMPERE):
        if capability >= table and shared_bytes >= TABLE_SHARED_BYTES[table]:
            return table
    raise ConfigError(
        f"fusedmoe: a GPU of compute capability {capability[0]}.{capability[1]} with {shared_bytes} bytes of shared "
        f"memory per block cannot run the kernels; they need 8.0 and {TABLE_SHARED_BYTES[AMPERE]} bytes"
    )


def generation_of(device: torch.device) -> Capability | None:
    """Return `generation` of a CUDA device, or None under Triton's interpreter."""
    if INTERPRET:
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # PyTorch's type stubs lack shared_memory_per_block_optin
    return generation((gpu.major, gpu.minor), gpu.shared_memory_per_block_optin)
