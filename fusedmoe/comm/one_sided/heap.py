"""A symmetric heap: memory of the same shape on every rank of a group, which kernels of all its ranks can address.

    with open_heap(group, device) as heap:
        rows = heap.allocate((2, 4, 128, 512), torch.bfloat16)
        rows.own            # this rank's copy
        rows.table          # where every rank's copy is, for kernels (fusedmoe/kernels/triton/one_sided/remote.py)

`heaps.py` has the backends and `open_heap`. After an error on any rank the next operation takes a new heap.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.failure.board import ORDER, PROCESS_ENDED
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError
from fusedmoe.kernels.one_sided import FAULT, RECORD, TIME_IS_UP, Bounds, Network
from fusedmoe.threads import LOOK_S, Helper


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
    """One symmetric allocation: this rank's copy, zeros at first, and where each rank's is in this process.

    `table`: [W] int64 on the device; 0 for far ranks, which only the heap's network reaches.
    """

    own: Tensor
    table: Tensor


class Heap:
    """Symmetric memory of a group. Every call is collective: all ranks make the same calls in the same order.

    A backend is a subclass that maps memory (`_map`). On leaving the `with` block the ranks meet before memory is given
    back, so that no peer still writes into it; where an error leaves the block they do not meet.

    Attributes:
        backend: the name under which `open_heap` knows it.   one_host: it joins ranks of one host only.
        abandoned: after an error, or once it is closed; nothing can be allocated from then on.
        network: leads to far ranks; None on all ranks where no rank is far from any.
        checks: each raises what kernels missed that waited for signals in this memory (`Watch`).
    """

    backend: str
    one_host = True
    network: Network | None = None

    def __init__(self, group: Group, device: torch.device) -> None:
        # Other threads have a current GPU of their own, so the heap says which one is meant.
        indexed = device if device != torch.device("cuda") else torch.device("cuda", torch.cuda.current_device())
        self.group, self.device = group, indexed
        self.abandoned = False
        self.checks: list[Callable[[], None]] = []
        # What a backend maps, for as long as the heap is open; peers keep their own mappings of it.
        self._memory: list[Tensor] = []
        group.job.heaps.add(self)

    @staticmethod
    def why_not(device: torch.device) -> str:
        """Returns why the backend does not work for the device in this process, and what to do; "" where it does."""
        raise NotImplementedError

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Allocates zeros of this shape on every rank; all ranks have theirs when it returns."""
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
        """Raises what kernels missed that waited for other ranks; on a GPU it waits for the current stream first."""
        for check in self.checks:
            check()

    def close(self) -> None:
        """Gives the memory back once all ranks are here; where one is not, leaves the heap as after an error."""
        if self.abandoned:
            return
        try:
            self.check()
            self._gather("close")
        except BaseException:
            self.abandon()
            raise
        self.abandoned = True
        self._memory.clear()
        self._free()

    def abandon(self) -> None:
        """Leaves the heap without meeting the other ranks, after an error."""
        # Rows that were in flight must not mix with new ones: nothing is ever allocated here again.
        self.abandoned = True
        self._memory.clear()

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        """Maps zeros of `size` bytes on all ranks; returns this rank's, and the address of every rank's."""
        raise NotImplementedError

    def _free(self) -> None:
        """Gives back what must not be freed before no rank addresses it."""

    def _gather(self, value: Any) -> list[Any]:
        return all_gather_object(self.group, value, f"allocation on the {self.backend} heap")


# Why kernels must not wait any longer, beside `TIME_IS_UP` and `FAULT`.
_VERDICT, _GONE = 2, 3
#: From the index of a signal to its peer's place in the group, and the rows of the peer that it tells of, in words.
Name = Callable[[int], tuple[int, str]]


class Watch:
    """Bounds the waits of kernels for signals in one heap, and raises what they missed.

    A kernel that waits for a peer cannot read the failure board, and in Triton's interpreter it has no clock. So it
    polls a stop flag, which a thread of the host sets once a rank has failed or the time is up. On a GPU kernels have
    a clock, run later, and the host does not wait for them: what they missed is raised by the first look that finds it.

    Attributes:
        bounds: for kernels (`fusedmoe.kernels.triton.one_sided.remote`), in memory that host and device share.
    """

    def __init__(self, heap: Heap) -> None:
        self._group, self._device = heap.group, heap.device
        memory = _shared(1 + RECORD, heap.device)
        self.stop, self.record = memory[:1], memory[1:]
        # The same memory, read after every launch that waits: without an operation of PyTorch.
        self._record = self.record.numpy()
        self.bounds = Bounds(self.stop, self.record, int(heap.group.job.timeout_s * 1e9))
        # By the address of the signals, which the record of a kernel has: the host may have issued much more meanwhile.
        self._names: dict[int, tuple[str, Name]] = {}
        self._faults: dict[str, int] = {}
        self._looker: Helper | None = None
        heap.checks.append(partial(self.check, wait=True))

    def name(self, signals: Tensor, operation: str, name: Name) -> None:
        """Names signals for errors. `operation`: the one that waits for them."""
        self._names[signals.data_ptr()] = operation, name

    def number(self, fault: str) -> int:
        """Returns the number of a fault that kernels may find (`Faults`), by the text behind how many there are. All
        ranks ask for the same in the same order."""
        return self._faults.setdefault(fault, len(self._faults) + 1)

    @contextmanager
    def over(self) -> Iterator[None]:
        """Wraps launches of kernels that wait for signals that have a name.

        Raises:
            RankError: a wait ended early, on a GPU perhaps one from before; it names rank, peer, rows and signals.
        """
        if self._group.size == 1 or self._device.type == "cuda":
            yield
            # Without waiting: `Heap.check`, at the end of a step and where the heap is closed, tells of the rest.
            self.check()
            return
        # A kernel in the interpreter runs on this thread, which cannot look at the board meanwhile.
        done = threading.Event()
        self._looker = self._looker or Helper("fusedmoe-watch")
        looking = self._looker.begin(partial(self._look, done))
        try:
            yield
        finally:
            done.set()
            self._looker.result(looking)
        self.check()

    def check(self, wait: bool = False) -> None:
        """Raises for a wait that has ended early until now; with `wait` after the current stream of the device."""
        later = self._device.type == "cuda"
        if later and wait:
            _settle(self._device)
        if not self._record[0]:
            return
        # The reason is written first. All waits end now, and with them the kernel that writes the rest.
        if later and not _settle(self._device):
            return
        reason, index, expected, seen, address = self.record.tolist()
        if reason == FAULT:
            raise self._fault(self._group.ranks[index], *divmod(expected, 2**32))
        operation, name = self._names[address]
        place, part = name(index)
        peer = self._group.ranks[place]
        raise self._error(operation, peer, f"{part} of rank {peer}, expected signal {expected}, seen {seen}")

    def _look(self, done: threading.Event) -> None:
        """Polls the failure board while kernels run, and sets their stop flag. Ends when they have ended."""
        # Where this thread fails, no other looks any more.
        reason = _GONE
        try:
            reason = self._reason_to_stop(done)
        finally:
            if reason:
                self.stop.fill_(reason)

    def _reason_to_stop(self, done: threading.Event) -> int:
        """Waits until kernels have ended; returns 0 then, and why they must not wait any longer before."""
        group, deadline = self._group, time.monotonic() + self._group.job.timeout_s
        peers = tuple(rank for rank in group.ranks if rank != group.job.rank)
        # Most waits are short, and end without a look at the board.
        pause = 0.02
        while not done.wait(pause):
            pause = LOOK_S
            board = group.job.board
            if board is not None and board.read() is not None:
                return _VERDICT
            if board is not None and board.gone(peers):
                return _GONE
            if time.monotonic() > deadline:
                return TIME_IS_UP
        return 0

    def _fault(self, rank: int, number: int, count: int) -> RankError:
        # Ranks that hear of it otherwise wait for one that has ended.
        group, me, text = self._group, self._group.job.rank, f"{count} {[*self._faults][number - 1]}"
        operation = f"kernels over the {group}"
        if group.job.board is not None:
            group.job.board.post(rank, operation, text)
        at_fault = "" if rank == me else f"ended because rank {rank} failed in {operation}: "
        return RankError(f"rank {me}: {at_fault}{text}")

    def _error(self, operation: str, peer: int, missed: str) -> RankError:
        group, me = self._group, self._group.job.rank
        where = f"{operation} over the {group}: waiting for {missed}"
        board = group.job.board
        if board is None:
            return RankError(f"rank {me}: {where}; the peer never came within {group.job.timeout_s:.0f} s")
        verdict: object = board.explain()
        if verdict is None and (dead := board.gone(tuple(rank for rank in group.ranks if rank != me))):
            verdict = board.post(dead[0], where, PROCESS_ENDED)
        if verdict is None:
            text = f"it did not come within {group.job.timeout_s:.0f} s. {ORDER}"
            verdict = board.blame(peer, where, f"{text}; if one is slow, give Topology a larger timeout_s")
        return RankError(f"rank {me}: {where}; it ended because {verdict}")


def _shared(count: int, device: torch.device) -> Tensor:
    """Returns int64 zeros in memory that both the host and the device address."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")


def _settle(device: torch.device) -> bool:
    """Waits for the current stream of a GPU; False where it is being captured, and cannot be waited for."""
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():
            return False
    stream.synchronize()
    return True
