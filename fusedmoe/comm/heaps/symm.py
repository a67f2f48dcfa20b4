"""PyTorch's symmetric memory: the GPUs of a node address each other's memory over NVLink or PCIe."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap


class SymmHeap(Heap):
    """Over the ranks of a process group of GPUs that reach each other."""

    backend = "symm"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._buffers: list[Tensor] = []

    def abandon(self) -> None:
        super().abandon()
        self._buffers = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(size, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        assert self.group.handle is not None
        handle = symmetric.rendezvous(own, self.group.handle)
        self._gather("mapped")  # all copies are zero before anybody writes
        self._buffers.append(own)
        return own, [int(address) for address in handle.buffer_ptrs]


def why_not(device: torch.device) -> str:
    """Why GPUs here cannot share such memory, "" where they can."""
    if device.type != "cuda":
        return "it is memory of CUDA GPUs; CPUs take shm"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    count = torch.cuda.device_count()
    apart = [
        (one, other)
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        return f"GPUs {apart[0][0]} and {apart[0][1]} cannot address each other; collectives carry the same plans"
    return ""
