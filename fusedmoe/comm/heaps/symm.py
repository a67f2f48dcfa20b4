"""PyTorch's symmetric memory: the GPUs of a node address each other's memory over NVLink or PCIe.

Read against torch 2.11 and 2.13, whose interfaces agree in what is used here (`INTERFACE`; tests hold the installed
torch to it). What they do that is not in their signatures:

- `empty` takes memory from a pool and gives it back there: freed memory may be the next allocation's at once. What is
  left after an error is therefore kept, since a peer may still write to it.
- `buffer_ptrs` are where the ranks' blocks begin; a tensor may lie behind that (`offset`). Ranks tell each other theirs.
- Other backends than "CUDA" (TORCH_SYMMMEM, `set_backend`) give no address, 0, of peers that only their own functions
  reach.
- A device needs an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.gpus import no_gpu, not_for_torch
from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap
from fusedmoe.errors import ConfigError

#: Of `torch.distributed._symmetric_memory`: functions with the arguments given here, and what a handle must have.
INTERFACE: dict[str, tuple[str, ...]] = {
    "empty": ("size", "dtype", "device"),
    "rendezvous": ("tensor", "group"),
    "_SymmetricMemory": ("buffer_ptrs", "rank"),
}

# Of heaps that an error ended: until the process ends, peers may write to it.
_left: list[Tensor] = []


class SymmHeap(Heap):
    """Over the ranks of a process group of GPUs that reach each other."""

    backend = "symm"

    def __init__(self, group: Group, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(group, torch.device("cuda", index))
        self._buffers: list[Tensor] = []

    def abandon(self) -> None:
        super().abandon()
        _left.extend(self._buffers)
        self._buffers = []

    def _free(self) -> None:
        self._buffers = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group.handle is not None
        own = symmetric.empty(size, dtype=torch.uint8, device=self.device).zero_()
        self._buffers.append(own)
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(own, self.group.handle)
        blocks = [int(address) for address in handle.buffer_ptrs]
        # All copies are zero before anybody writes.
        behind = self._gather(own.data_ptr() - blocks[handle.rank] if blocks[handle.rank] else None)
        if not all(blocks) or None in behind:
            raise ConfigError(
                f"rank {self.group.job.rank}: PyTorch's symmetric memory gives no addresses of ranks "
                f"{[rank for rank, block in zip(self.group.ranks, blocks, strict=True) if not block]}, so that kernels "
                "cannot reach them. Leave its backend at CUDA (TORCH_SYMMMEM), or open the heap with backend='nvshmem'."
            )
        return own, [block + place for block, place in zip(blocks, behind, strict=True)]


def why_not(device: torch.device) -> str:
    """Why GPUs here cannot share such memory, "" where they can."""
    if device.type != "cuda":
        return "it is memory of CUDA GPUs; CPUs take shm"
    if reason := no_gpu() or not_for_torch():
        return reason
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                pair = f"GPUs {one} and {other}"
                return f"{pair} do not reach each other's memory (see nvidia-smi topo -p2p r); collectives do without"
    return ""
