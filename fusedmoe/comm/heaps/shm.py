"""Memory that processes of one host share, for kernels in Triton's interpreter.

Each rank makes anonymous files (memfd) and the others open them through its process: nothing ever has a name in
/dev/shm, so that nothing is left there either, wherever a rank is killed. The memory lives as long as anybody maps it;
a peer that is late writes into memory that nobody reads any more, never into freed memory.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap


class ShmHeap(Heap):
    """Over processes of one host."""

    backend = "shm"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._views: list[Tensor] = []

    def abandon(self) -> None:
        super().abandon()
        self._free()

    def _free(self) -> None:
        self._views = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        file = os.memfd_create("fusedmoe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            files = self._gather((os.getpid(), file))
            views = [_view(f"/proc/{pid}/fd/{number}", size) for pid, number in files]
            self._gather("mapped")  # before anybody closes what others open
        finally:
            os.close(file)
        self._views += views
        return views[self.group.index], [view.data_ptr() for view in views]


def _view(path: str, size: int) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
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
        file = os.memfd_create("fusedmoe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, mmap.PAGESIZE)
            _view(f"/proc/{os.getpid()}/fd/{file}", mmap.PAGESIZE)
        finally:
            os.close(file)
    except OSError as error:
        return f"shared memory cannot be made or opened through /proc ({error}); mount /proc, or raise memory limits"
    return ""
