"""PyTorch's symmetric memory: the GPUs of a node address each other's memory over NVLink or PCIe."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.gpus import no_gpu, not_for_torch
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
    if reason := no_gpu() or not_for_torch():
        return reason
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                pair = f"GPUs {one} and {other}"
                return f"{pair} do not reach each other's memory (see nvidia-smi topo -p2p r); collectives do without"
    return ""
