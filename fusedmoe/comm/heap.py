"""A symmetric heap: memory of the same shape on every rank of a group, which kernels of all of them can address.

    with open_heap(group, device) as heap:
        rows = heap.allocate((2, 4, 128, 512), torch.bfloat16)
        rows.own            # this rank's copy
        rows.table          # where every rank's copy is, for kernels (fusedmoe/kernels/triton/one_sided/remote.py)

Backends (`fusedmoe.comm.heaps`), each where it works: `host` (processes of one host, memory shared by the kernel; for
Triton's interpreter), `local` (virtual ranks of one process), `symm` (the GPUs of a node, PyTorch's symmetric memory),
`nvshmem` (GPUs of several nodes).

After an error anywhere nothing that was in flight may meet new data: an abandoned heap is never used again, the next
operation takes a new one.
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
    """Why the driver offers no GPU here; "" where it does. Loads nothing but the driver."""
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
    """Why PyTorch cannot use the driver's GPUs; "" where it can."""
    if torch.version.cuda is None:
        return "this PyTorch is a build without CUDA; install one for CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch for CUDA {torch.version.cuda} finds no GPU; the driver may be too old for it (nvidia-smi)"
    return ""


# Rows start where vector and bulk copies can.
_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class Symmetric:
    """One symmetric allocation: this rank's copy, and the addresses of all.

    Attributes:
        own: this rank's copy, zeros at first.
        table: [W] int64, on the device, the address of each rank's copy in this process; 0 for ranks that are far,
            where only the heap's network leads.
    """

    own: Tensor
    table: Tensor


class Heap:
    """Symmetric memory of a group. Every call is collective: the same ones in the same order on all ranks.

    Backends say how memory is had (`_map`). On leaving the `with` block the ranks meet before memory is given back, so
    that no peer still writes into it; where an error leaves the block they do not, and each keeps what peers may still
    address until its process ends or the memory's owner is gone, whichever the backend needs.

    Attributes:
        group, device: whose memory, and where.
        abandoned: after an error; nothing can be allocated from then on.
        network: leads to far ranks; None on all ranks where none is far from any.
        checks: each raises what kernels missed that waited for what others put here (`fusedmoe.comm.watch`).
    """

    backend: str
    network: Network | None = None

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.abandoned = False
        self.checks: list[Callable[[], None]] = []
        group.job.heaps.add(self)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Zeros of this shape on every rank; all ranks have theirs when it returns.

        Raises:
            RankError: the ranks ask for different shapes, one does not come, or the heap is abandoned.
        """
        if self.abandoned:
            raise RankError(f"rank {self.group.job.rank}: this heap was left after an error; open a new one")
        wanted = (list(shape), str(dtype))
        for rank, other in zip(self.group.ranks, self._gather(wanted), strict=True):
            if other != wanted:
                raise RankError(
                    f"rank {self.group.job.rank}: symmetric memory must be alike on all ranks, but rank {rank} wants "
                    f"{other} and this rank {wanted}"
                )
        count = torch.Size(shape).numel()
        size = max(_ALIGNMENT, -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        bytes_own, addresses = self._map(size)
        own = bytes_own[: count * dtype.itemsize].view(dtype).view(tuple(shape))
        return Symmetric(own, torch.tensor(addresses, dtype=torch.int64, device=self.device))

    def check(self) -> None:
        """Raises what kernels missed that waited for other ranks; on a GPU it waits for the current stream first.

        Raises:
            RankError: a wait ended early (`fusedmoe.comm.watch`).
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
        """Leaves the heap without meeting the others: after an error."""
        self.abandoned = True

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _free(self) -> None:
        """Gives back what nobody addresses any more."""

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        """This rank's bytes, zeros, and every rank's address of theirs; all ranks have mapped all when it returns."""
        raise NotImplementedError

    def _gather(self, thing: Any) -> list[Any]:
        return all_gather_object(self.group, thing, f"allocation on the {self.backend} heap")
