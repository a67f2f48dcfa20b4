"""A symmetric heap: memory of the same shape on every rank of a group, which kernels of all its ranks can address.

    with open_heap(group, device) as heap:
        rows = heap.allocate((2, 4, 128, 512), torch.bfloat16)
        rows.own            # this rank's copy
        rows.table          # where every rank's copy is, for kernels (fusedmoe/kernels/triton/one_sided/remote.py)

`heaps.py` has the backends and `open_heap`. After an error on any rank, rows that were in flight must not mix with new
ones: an abandoned heap is never used again, and the next operation takes a new one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError
from fusedmoe.kernels.one_sided import Network


def no_gpu() -> str:
    """Returns why the driver offers no GPU, "" where it does. Loads nothing but the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded), and it is for NVIDIA GPUs"
    if error := driver.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit returned {error}); nvidia-smi may say why"
    count = c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU; see CUDA_VISIBLE_DEVICES"
    return ""


def not_for_torch() -> str:
    """Returns why PyTorch cannot use the driver's GPUs, "" where it can."""
    if torch.version.cuda is None:
        return "this PyTorch is a build without CUDA; install one for CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch for CUDA {torch.version.cuda} finds no GPU; the driver may be too old for it (nvidia-smi)"
    return ""


# Rows start at addresses where vector and bulk copies can start.
_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class Symmetric:
    """One symmetric allocation: this rank's copy, and the addresses of all.

    Attributes:
        own: this rank's copy, zeros at first.
        table: [W] int64, on the device, the address of each rank's copy in this process; 0 for far ranks, which only
            the heap's network reaches.
    """

    own: Tensor
    table: Tensor


class Heap:
    """Symmetric memory of a group. Every call is collective: all ranks make the same calls in the same order.

    A backend is a subclass that maps memory (`_map`). On leaving the `with` block the ranks meet before memory is given
    back, so that no peer still writes into it. Where an error leaves the block they do not meet: each rank keeps the
    memory that peers may still address until its process ends or the memory's owner is gone, whichever the backend
    needs.

    Attributes:
        backend: the name under which `open_heap` knows it.
        one_host: the backend joins ranks of one host only.
        group, device: whose memory, and where.
        abandoned: after an error; nothing can be allocated from then on.
        network: leads to far ranks; None on all ranks where no rank is far from any.
        checks: each raises what kernels missed that waited for signals in this memory (`Watch`).
    """

    backend: str
    one_host = True
    network: Network | None = None

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.abandoned = False
        self.checks: list[Callable[[], None]] = []
        group.job.heaps.add(self)

    @staticmethod
    def why_not(device: torch.device) -> str:
        """Returns why the backend does not work for the device in this process, and what to do; "" where it does."""
        raise NotImplementedError

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Allocates zeros of this shape on every rank; all ranks have theirs when it returns.

        Raises:
            RankError: the ranks ask for different shapes, one does not come, or the heap is abandoned.
        """
        if self.abandoned:
            raise RankError(f"rank {self.group.job.rank}: this heap was left after an error; open a new one")
        wanted = (list(shape), str(dtype))
        for rank, asked in zip(self.group.ranks, self._gather(wanted), strict=True):
            if asked != wanted:
                raise RankError(
                    f"rank {self.group.job.rank}: symmetric memory must be alike on all ranks, but rank {rank} wants "
                    f"{asked} and this rank {wanted}"
                )
        count = torch.Size(shape).numel()
        size = max(_ALIGNMENT, -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        bytes_own, addresses = self._map(size)
        own = bytes_own[: count * dtype.itemsize].view(dtype).view(tuple(shape))
        return Symmetric(own, torch.tensor(addresses, dtype=torch.int64, device=self.device))

    def check(self) -> None:
        """Raises what kernels missed that waited for other ranks; on a GPU it waits for the current stream first.

        Raises:
            RankError: a wait ended early (`Watch`).
        """
        for check in self.checks:
            check()

    def close(self) -> None:
        """Gives the memory back once all ranks are here.

        Raises:
            RankError: as `check`; or another rank failed, or does not come. The heap is then left as after an error.
        """
        if self.abandoned:
            return
        try:
            self.check()
            self._gather("close")
        except BaseException:
            self.abandon()
            raise
        self.abandoned = True
        self._free()

    def abandon(self) -> None:
        """Leaves the heap without meeting the other ranks, after an error."""
        self.abandoned = True

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _free(self) -> None:
        """Gives back memory that no rank addresses any more."""

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        """Maps zeros of `size` bytes; returns this rank's, and the address of every rank's.

        All ranks have mapped all when it returns.
        """
        raise NotImplementedError

    def _gather(self, value: Any) -> list[Any]:
        return all_gather_object(self.group, value, f"allocation on the {self.backend} heap")
