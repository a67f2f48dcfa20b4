"""PyTorch's symmetric memory: the GPUs of a node address each other's memory over NVLink or PCIe.

Read against torch 2.11 and 2.13, which agree in what is used here (`INTERFACE`; a test holds the installed torch to
it). What their signatures do not say:

- `symmetric_memory.empty` takes memory from a pool that gives it out anew as soon as it is freed, and `rendezvous` of
  memory that has been through one returns what it found then, without asking the other ranks. After an error, or where
  ranks have freed different things, a heap would address what is somebody else's by now. `empty_strided_p2p` makes an
  allocation of its own each time. Freed, it is gone here once the device is done; for peers it stays until they free
  theirs.
- Backends other than "CUDA" (`TORCH_SYMMMEM`, `set_backend`) know no address of peers that only their functions reach.
- The device must have an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap, no_gpu, not_for_torch
from fusedmoe.errors import ConfigError

#: Of `torch._C._distributed_c10d._SymmetricMemory` what is called, with the arguments given here, and what is read.
INTERFACE: dict[str, tuple[str, ...] | None] = {
    "empty_strided_p2p": ("size", "stride", "dtype", "device"),
    "rendezvous": ("tensor", "group_name"),
    "buffer_ptrs": None,
    "rank": None,
}


class SymmHeap(Heap):
    """The heap over GPUs of a node that address each other's memory."""

    backend = "symm"

    def __init__(self, group: Group, device: torch.device) -> None:
        here = device if device != torch.device("cuda") else torch.device("cuda", torch.cuda.current_device())
        super().__init__(group, here)
        self._buffers: list[Tensor] = []

    def abandon(self) -> None:
        super().abandon()
        self._free()

    def _free(self) -> None:
        self._buffers = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        from torch._C._distributed_c10d import _SymmetricMemory

        assert self.group.handle is not None
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device).zero_()
        self._buffers.append(own)
        torch.cuda.synchronize(self.device)
        handle = _SymmetricMemory.rendezvous(own, self.group.handle.group_name)
        addresses = [int(address) for address in handle.buffer_ptrs]
        known = all(addresses) and addresses[handle.rank] == own.data_ptr()
        # All copies are zero before anybody writes.
        without = [rank for rank, knows in zip(self.group.ranks, self._gather(known), strict=True) if not knows]
        if without:
            raise ConfigError(
                f"rank {self.group.job.rank}: PyTorch's symmetric memory has no addresses of all peers on ranks "
                f"{without}, so that kernels cannot reach them. Leave its backend at CUDA (TORCH_SYMMMEM), or take "
                "backend='nvshmem'."
            )
        return own, addresses


def why_not(device: torch.device) -> str:
    """Why GPUs here cannot share such memory, "" where they can."""
    if device.type != "cuda":
        return "it is memory of CUDA GPUs; CPUs take host"
    if reason := no_gpu() or not_for_torch():
        return reason
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                pair = f"GPUs {one} and {other}"
                return f"{pair} do not reach each other's memory (see nvidia-smi topo -p2p r); collectives do without"
    return ""
