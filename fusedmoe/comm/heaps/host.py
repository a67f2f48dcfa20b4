"""Heaps in memory of one host: shared by its processes, or by virtual ranks of one process.

`HostHeap` is for kernels in Triton's interpreter. Each rank makes anonymous files (memfd) and the others open them
through its process: nothing ever has a name in /dev/shm, so that nothing is left there either, wherever a rank is
killed. The memory lives as long as anybody maps it; a peer that is late writes into memory that nobody reads any more,
never into freed memory.

`LocalHeap` is for tests, and for measurements of what kernels cost without a network: `local_heaps(4, device)` gives
the heaps of four virtual ranks on one device, whose copies lie side by side in its memory. They allocate in turn, each
the same things in the same order; the first one makes the memory of all.
"""

from __future__ import annotations

import errno
import mmap
import os

import torch
from torch import Tensor

from fusedmoe.comm.group import Group, Job, lost
from fusedmoe.comm.heap import Heap


class HostHeap(Heap):
    """The heap over processes of one host, for kernels in Triton's interpreter."""

    backend = "host"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._views: list[Tensor] = []

    def abandon(self) -> None:
        super().abandon()
        self._free()

    def _free(self) -> None:
        self._views = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        group, operation = self.group, "allocation on the host heap"
        try:
            file = _new_file(size)
        except OSError as error:
            group.refuse(operation, f"no memory for {size} bytes ({error}). Raise its limits, or make batches smaller")
        try:
            files = self._gather((os.getpid(), file, os.fstat(file).st_ino))
            try:
                views = [_view(f"/proc/{pid}/fd/{number}", size, inode) for pid, number, inode in files]
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    group.refuse(operation, f"no memory to map {size} bytes of each rank ({error}). Raise its limits")
                # A peer that has failed meanwhile has closed its file; the number may be of another by now.
                raise lost(group.job, group.ranks, operation, f"the {group}", str(error)) from error
            self._gather("mapped")  # before anybody closes what others open
        finally:
            os.close(file)
        self._views += views
        return views[self.group.index], [view.data_ptr() for view in views]


def _new_file(size: int) -> int:
    file = os.memfd_create("fusedmoe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _view(path: str, size: int, inode: int) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_ino != inode:
            raise FileNotFoundError(errno.ENOENT, "it is another file by now", path)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)  # the tensor keeps the mapping
    finally:
        os.close(file)


def why_not(device: torch.device) -> str:
    """Why processes cannot share such memory, "" where they can."""
    if device.type != "cpu":
        return "it is memory of the host; GPUs take symm or nvshmem"
    if not hasattr(os, "memfd_create"):
        return "it needs Linux (memfd)"
    try:
        file = _new_file(mmap.PAGESIZE)
        try:
            _view(f"/proc/{os.getpid()}/fd/{file}", mmap.PAGESIZE, os.fstat(file).st_ino)
        finally:
            os.close(file)
    except OSError as error:
        return f"shared memory cannot be made or opened through /proc ({error}); mount /proc, or raise memory limits"
    return ""


class LocalHeap(Heap):
    """The heap of one virtual rank. `everything`: the allocations, shared by all of them."""

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
