"""Heaps of virtual ranks: W of them in one process, whose copies lie side by side on one device.

For tests, and for what kernels cost without a network. Virtual ranks have no group over which `open_heap` could open
one: their heaps are made together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.one_sided.heap import Heap


class LocalHeap(Heap):
    """The heap of one virtual rank. `everything`: the allocations, which all virtual ranks share."""

    backend = "local"

    def __init__(self, index: int, size: int, device: torch.device, everything: list[Tensor], job: Job) -> None:
        super().__init__(Group("virtual", tuple(range(size)), index, job=job), device)
        self._everything, self._taken = everything, 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        if self._taken == len(self._everything):
            # The first virtual rank makes the memory of all; the others allocate in the same order after it.
            self._everything.append(torch.zeros((self.group.size, size), dtype=torch.uint8, device=self.device))
        all_Wb = self._everything[self._taken]
        self._taken += 1
        return all_Wb[self.group.index], [copy.data_ptr() for copy in all_Wb]

    def _gather(self, value: object) -> list[object]:
        return [value] * self.group.size


def local_heaps(size: int, device: torch.device, timeout_s: float = 10.0) -> list[LocalHeap]:
    """Returns the heaps of `size` virtual ranks on one device, whose copies lie side by side in its memory.

    `timeout_s`: how long a kernel waits for another virtual rank. No rank is slow to start in one process: one that
    does not come soon never will, and a GPU can do nothing else meanwhile.
    """
    everything: list[Tensor] = []
    return [LocalHeap(index, size, device, everything, Job(index, timeout_s)) for index in range(size)]
