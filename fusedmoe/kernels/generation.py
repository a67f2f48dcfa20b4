"""Generations of GPUs: which tables of tiles suit a device, by its tensor cores and its shared memory.

Tables exist for sm_80, sm_90 and sm_100. A device takes the table of its own products (wgmma on Hopper, tcgen05 on
Blackwell for data centres) if a block has the shared memory that the tiles need. Any other device takes the table of
sm_80, whose products (mma) all have: sm_86 and sm_89, and sm_120, where a block has 99 KB.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET

Capability = tuple[int, int]

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
# Bytes of shared memory that the tiles of a table may need in a block; ahead-of-time compilation checks them.
NEEDED = {AMPERE: 101_376, HOPPER: 232_448, BLACKWELL: 232_448}
# By the major compute capability.
_PRODUCTS = {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}


def generation(capability: Capability, shared_bytes: int) -> Capability:
    """Return the generation whose tables suit a device.

    Args:
        capability: compute capability of the device.
        shared_bytes: the most shared memory that a block can have.
    Raises:
        ConfigError: the kernels cannot run on such a device.
    """
    own = _PRODUCTS.get(capability[0], AMPERE)
    for table in (own, AMPERE):
        if capability >= table and shared_bytes >= NEEDED[table]:
            return table
    raise ConfigError(
        f"fusedmoe: a GPU of compute capability {capability[0]}.{capability[1]} with {shared_bytes} bytes of shared "
        f"memory in a block cannot run the kernels; they need 8.0 and {NEEDED[AMPERE]} bytes"
    )


def generation_of(device: torch.device) -> Capability | None:
    """Return the generation of a CUDA device, or None in the interpreter."""
    if INTERPRET:
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # PyTorch's types lack a field
    return generation((gpu.major, gpu.minor), gpu.shared_memory_per_block_optin)
