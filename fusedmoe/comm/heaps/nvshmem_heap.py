"""NVSHMEM's symmetric memory: GPUs of several nodes. Those of a node address each other, others are far."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm import nvshmem
from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap
from fusedmoe.comm.nvshmem import Nvshmem
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.one_sided import Network


class NvshmemHeap(Heap):
    """Over the ranks of a group, as a use of the process's NVSHMEM job (`fusedmoe.comm.nvshmem.Nvshmem`)."""

    backend = "nvshmem"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._job = Nvshmem(group, device)
        first = self._job.allocate(8)
        if any(self._gather(not first.table.all())):
            self.network = Network(first.pe_W, first.own.view(torch.int64), nvshmem_bitcode())

    def abandon(self) -> None:
        super().abandon()
        self._job.abandon()

    def _free(self) -> None:
        self._job.close()

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        memory = self._job.allocate(size)
        return memory.own, memory.table.tolist()


def why_not(device: torch.device) -> str:
    """Why NVSHMEM cannot be used in this process, "" where it can."""
    if device.type != "cuda":
        return "it is memory of CUDA GPUs; CPUs take host"
    if reason := nvshmem.why_not():
        return reason
    try:
        nvshmem_bitcode()
    except ConfigError as error:
        return str(error)
    return ""
