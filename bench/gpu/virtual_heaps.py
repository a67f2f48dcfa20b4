"""Symmetric heaps of W virtual ranks in one process, with adjacent copies on one device.

For tests, and to measure kernels without a network. Virtual ranks have no group for `open_heap`, so their heaps are
created together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.one_sided.heap import Heap


class LocalHeap(Heap):
    """Heap of one virtual rank. `everything`: allocations shared by all virtual ranks."""

    backend = "local"

    def __init__(self, index: int, size: int, device: torch.device, everything: list[Tensor], job: Job) -> None:
        super().__init__(Group("virtual", tuple(range(size)), index, job=job), device)
        self._everything, self._taken = everything, 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        if self._taken == len(self._everything):
            # The first virtual rank allocates for all; the others follow in the same order.
            self._everything.append(torch.zeros((self.group.size, size), dtype=torch.uint8, device=self.device))
        all_Wb = self._everything[self._taken]
        self._taken += 1
        return all_Wb[self.group.index], [copy.data_ptr() for copy in all_Wb]

    def _all_gather(self, value: object) -> list[object]:
        return [value] * self.group.size


def local_heaps(size: int, device: torch.device, timeout_s: float = 10.0) -> list[LocalHeap]:
    """Return the heaps of `size` virtual ranks on one device, with adjacent copies.

    `timeout_s`: how long a kernel waits for another virtual rank. In one process no rank starts late, so a short
    timeout suffices and frees the GPU early.
    """
    everything: list[Tensor] = []
    return [LocalHeap(index, size, device, everything, Job(index, timeout_s)) for index in range(size)]
