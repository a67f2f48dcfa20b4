"""Virtual ranks of one process, whose copies lie side by side in its memory: many ranks on one GPU.

For tests and for measurements of what kernels cost without a network: `local_heaps(4, device)` gives the heaps of four
ranks. They allocate in turn, each the same things in the same order; the first one makes the memory of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.heap import Heap


class LocalHeap(Heap):
    """One of the virtual ranks. `everything`: the allocations, shared by all of them."""

    backend = "local"

    def __init__(self, index: int, size: int, device: torch.device, everything: list[Tensor], job: Job) -> None:
        super().__init__(Group("virtual", tuple(range(size)), index, job=job), device)
        self._everything, self._taken = everything, 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        if self._taken == len(self._everything):
            self._everything.append(torch.zeros((self.group.size, size), dtype=torch.uint8, device=self.device))
        all_Wb = self._everything[self._taken]
        self._taken += 1
        return all_Wb[self.group.index], [copy.data_ptr() for copy in all_Wb]

    def _gather(self, thing: object) -> list[object]:
        return [thing] * self.group.size


def local_heaps(size: int, device: torch.device, timeout_s: float = 10.0) -> list[LocalHeap]:
    """The heaps of so many virtual ranks.

    `timeout_s`: how long a kernel waits for another virtual rank. Nobody is slow to start in one process: whoever does
    not come soon never will, and a GPU can do nothing else meanwhile.
    """
    everything: list[Tensor] = []
    return [LocalHeap(index, size, device, everything, Job(index, timeout_s)) for index in range(size)]
