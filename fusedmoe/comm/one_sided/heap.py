"""Symmetric heap: memory of equal shape on every rank of a group, addressable by the kernels of all its ranks.

    with open_heap(group, device) as heap:
        rows = heap.allocate((2, 4, 128, 512), torch.bfloat16)
        rows.own            # this rank's copy
        rows.table          # addresses of all copies, for kernels (fusedmoe/kernels/triton/one_sided/remote.py)

After an error on any rank, open a new heap.
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
from fusedmoe.comm.failure.board import ORDER_RULE, PROCESS_ENDED
from fusedmoe.comm.group import Group
from fusedmoe.errors import TIMEOUT_CURE, RankError
from fusedmoe.kernels.one_sided import FAULT, RECORD_SIZE, TIMED_OUT, Bounds, Network
from fusedmoe.threads import POLL_S, WorkerThread


def no_gpu_reason() -> str:
    """Return why there is no GPU, else "". Loads only the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded); the backend needs an NVIDIA GPU"
    if error := driver.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit returned {error}); nvidia-smi may say why"
    count = c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU; see CUDA_VISIBLE_DEVICES"
    return ""


def no_torch_cuda_reason() -> str:
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        return f"PyTorch for CUDA {torch.version.cuda} finds no GPU; the driver may be too old for it (nvidia-smi)"
    return ""


_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """This rank's copy of a symmetric allocation, and the addresses of the copies of all ranks.

    Attributes:
        own: this rank's copy, initially zero.
        table: [W] int64 on the device, address of each rank's copy as mapped in this process; 0 for remote ranks,
            whose copies only the heap's network can reach.
    """

    own: Tensor
    table: Tensor


class Heap:
    """Symmetric memory of a group. Every call is collective, in the same order on all ranks.

    At the end of the `with` block the ranks synchronize before memory is freed, so that no peer still writes to it.
    After an error they do not.

    Attributes:
        is_single_host: True if all ranks must be on one host.
        is_abandoned: True after an error or `close`; `allocate` then raises.
        network: access to remote ranks; None on all ranks if no rank is remote.
        checks: functions that raise `RankError` if a kernel's wait for this heap's signals has failed (`Watch`).
    """

    backend: str
    is_single_host = True
    network: Network | None = None

    def __init__(self, group: Group, device: torch.device) -> None:
        indexed = device if device != torch.device("cuda") else torch.device("cuda", torch.cuda.current_device())
        self.group, self.device = group, indexed
        self.is_abandoned = False
        self.failed_wait_checks: list[Callable[[], None]] = []
        # Mappings of this rank; peers keep theirs.
        self._mappings: list[Tensor] = []
        group.job.heaps.add(self)

    @staticmethod
    def unavailable_reason(device: torch.device) -> str:
        """Return why the backend cannot be used on the device, and a fix, else ""."""
        raise NotImplementedError

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Allocate zeros of this shape on every rank. Returns after all ranks have allocated."""
        if self.is_abandoned:
            raise RankError(f"rank {self.group.job.rank}: this heap was abandoned after an error; open a new one")
        own_request = (list(shape), str(dtype))
        for rank, request in zip(self.group.ranks, self._all_gather(own_request), strict=True):
            if request != own_request:
                raise RankError(
                    f"rank {self.group.job.rank}: symmetric memory must be equal on all ranks, but rank {rank} "
                    f"requests {request} and this rank {own_request}"
                )
        count = torch.Size(shape).numel()
        size = max(_ALIGNMENT, -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        bytes_own, addresses = self._map(size)
        own = bytes_own[: count * dtype.itemsize].view(dtype).view(tuple(shape))
        return SymmetricTensor(own, torch.tensor(addresses, dtype=torch.int64, device=self.device))

    def check(self) -> None:
        """Raise `RankError` if a kernel's wait has failed. On a GPU, first synchronizes the current stream."""
        for check in self.failed_wait_checks:
            check()

    def close(self) -> None:
        """Free the memory after all ranks have called `close`; abandon the heap if a rank failed."""
        if self.is_abandoned:
            return
        try:
            self.check()
            self._all_gather("close")
        except BaseException:
            self.abandon()
            raise
        self.is_abandoned = True
        self._mappings.clear()
        self._free()

    def abandon(self) -> None:
        """Mark the heap unusable after an error, without waiting for other ranks."""
        # Peers may still write here: the memory is never allocated again.
        self.is_abandoned = True
        self._mappings.clear()

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        """Map `size` zero bytes on all ranks. Return this rank's memory and the address of every rank's."""
        raise NotImplementedError

    def _free(self) -> None:
        """Free resources that must stay mapped until no rank addresses them."""

    def _all_gather(self, value: Any) -> list[Any]:
        return all_gather_object(self.group, value, f"allocation on the {self.backend} heap")


# Reasons to stop waiting, in addition to `TIMED_OUT` and `FAULT`.
_VERDICT_POSTED, _PEER_ENDED = 2, 3
#: Maps a signal's index to the peer's index in the group and a description of the awaited rows.
DescribeSignal = Callable[[int], tuple[int, str]]


class SignalWatch:
    """Bounds kernels' waits for signals of one heap, and raises failed waits.

    Interpreted kernels have no clock: they poll a stop flag, which a host thread sets after a failure or timeout.
    Kernels on a GPU run asynchronously, with a clock: a later check raises their failed waits.

    `bounds`: for kernels (`fusedmoe.kernels.triton.one_sided.remote`), in memory shared by host and device.
    """

    def __init__(self, heap: Heap) -> None:
        self._group, self._device = heap.group, heap.device
        memory = _allocate_failure_record(1 + RECORD_SIZE, heap.device)
        self.stop, self.record = memory[:1], memory[1:]
        # As NumPy: it is read after every launch, without a PyTorch operation.
        self._failure_record_array = self.record.numpy()
        self.bounds = Bounds(self.stop, self.record, int(heap.group.job.timeout_s * 1e9))
        # Keyed by signal address, which kernels record: more launches may have been issued since.
        self._operation_by_signal: dict[int, tuple[str, DescribeSignal]] = {}
        self._fault_numbers: dict[str, int] = {}
        self._polling_thread: WorkerThread | None = None
        heap.failed_wait_checks.append(partial(self.check, wait=True))

    def name_signals(self, signals: Tensor, operation: str, describe: DescribeSignal) -> None:
        self._operation_by_signal[signals.data_ptr()] = operation, describe

    def fault_number(self, fault: str) -> int:
        """Return the number by which kernels report a fault. `fault`: error text after the count.

        All ranks must request faults in the same order.
        """
        return self._fault_numbers.setdefault(fault, len(self._fault_numbers) + 1)

    @contextmanager
    def guard_launches(self) -> Iterator[None]:
        """Context for launches of kernels that wait for signals registered with `name_signals`.

        Raises:
            RankError: a kernel's wait failed; names rank, peer, rows and signals. On a GPU, kernels may still be
                running at the exit: it reports failures known by then, also of earlier launches, and a later check the
                others.
        """
        if self._group.size == 1 or self._device.type == "cuda":
            yield
            # Does not wait: `Heap.check` reports the remaining failures.
            self.check()
            return
        # An interpreted kernel runs on this thread, so another thread polls the board.
        has_ended = threading.Event()
        self._polling_thread = self._polling_thread or WorkerThread("fusedmoe-watch")
        polling = self._polling_thread.submit(partial(self._poll_board, has_ended))
        try:
            yield
        finally:
            has_ended.set()
            self._polling_thread.result(polling)
        self.check()

    def check(self, wait: bool = False) -> None:
        """Raise `RankError` if a kernel's wait has failed. `wait`: synchronize the current stream first."""
        is_async = self._device.type == "cuda"
        if is_async and wait:
            _synchronize(self._device)
        if not self._failure_record_array[0]:
            return
        # The reason is written before the other fields. All waits end after a reason, so the stream can be
        # synchronized.
        if is_async and not _synchronize(self._device):
            return
        reason, index, expected, seen, address = self.record.tolist()
        if reason == FAULT:
            raise self._fault_error(self._group.ranks[index], *divmod(expected, 2**32))
        operation, name = self._operation_by_signal[address]
        peer_index, rows = name(index)
        peer = self._group.ranks[peer_index]
        raise self._wait_error(operation, peer, f"{rows} of rank {peer}, expected signal {expected}, seen {seen}")

    def _poll_board(self, has_ended: threading.Event) -> None:
        # If this thread fails, nothing else polls.
        reason = _PEER_ENDED
        try:
            reason = self._wait_for_reason_to_stop(has_ended)
        finally:
            if reason:
                self.stop.fill_(reason)

    def _wait_for_reason_to_stop(self, has_ended: threading.Event) -> int:
        group, deadline = self._group, time.monotonic() + self._group.job.timeout_s
        peers = tuple(rank for rank in group.ranks if rank != group.job.rank)
        pause = 0.02
        while not has_ended.wait(pause):
            pause = POLL_S
            board = group.job.board
            if board is not None and board.read() is not None:
                return _VERDICT_POSTED
            if board is not None and board.ended_ranks(peers):
                return _PEER_ENDED
            if time.monotonic() > deadline:
                return TIMED_OUT
        return 0

    def _fault_error(self, rank: int, number: int, count: int) -> RankError:
        # Posted for ranks that do not receive the fault.
        group, me, text = self._group, self._group.job.rank, f"{count} {[*self._fault_numbers][number - 1]}"
        operation = f"kernels over the {group}"
        if group.job.board is not None:
            group.job.board.post(rank, operation, text)
        at_fault = "" if rank == me else f"ended because rank {rank} failed in {operation}: "
        return RankError(f"rank {me}: {at_fault}{text}")

    def _wait_error(self, operation: str, peer: int, awaited: str) -> RankError:
        group, me = self._group, self._group.job.rank
        where = f"{operation} over the {group}: waiting for {awaited}"
        board = group.job.board
        if board is None:
            return RankError(f"rank {me}: {where}; the peer did not signal within {group.job.timeout_s:.0f} s")
        verdict: object = board.final_verdict()
        if verdict is None and (dead := board.ended_ranks(tuple(rank for rank in group.ranks if rank != me))):
            verdict = board.post(dead[0], where, PROCESS_ENDED)
        if verdict is None:
            text = f"it did not signal within {group.job.timeout_s:.0f} s. {ORDER_RULE}"
            verdict = board.blame(peer, where, f"{text}; if one is slow, {TIMEOUT_CURE}")
        return RankError(f"rank {me}: {where}; it ended because {verdict}")


def _allocate_failure_record(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")


def _synchronize(device: torch.device) -> bool:
    """Synchronize the current stream. Return False, without waiting, during graph capture."""
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():
            return False
    stream.synchronize()
    return True
