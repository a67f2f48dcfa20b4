"""Choice of a table of GEMM tile sizes by GPU generation: its tensor-core instruction and shared memory per block.

Hopper (wgmma) and data-centre Blackwell (tcgen05) use their table if a block has enough shared memory for its tiles.
All other devices, such as sm_120 (99 KB per block), use the sm_80 table, whose mma instruction every GPU supports.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET

Capability = tuple[int, int]

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
# Maximum shared memory in bytes per block of a table's tiles, checked by ahead-of-time compilation.
TABLE_SHARED_BYTES = {AMPERE: 101_376, HOPPER: 232_448, BLACKWELL: 232_448}
_TABLE_OF_MAJOR = {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}


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
