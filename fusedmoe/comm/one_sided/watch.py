"""Bounded waits of kernels: a stop flag that they poll is set once a rank has failed or the time is up.

A kernel that waits for a peer cannot read the failure board, and in Triton's interpreter it has no clock. So while
kernels run that may wait, a thread of the host looks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fusedmoe.comm.failure.board import ORDER, PROCESS_ENDED
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.errors import RankError
from fusedmoe.kernels.one_sided import RECORD, TIME_IS_UP, Bounds
from fusedmoe.threads import LOOK_S, Helper

_VERDICT, _GONE = 2, 3


#: From the index of a signal to its peer's place in the group, and the rows of the peer that it tells of, in words.
Name = Callable[[int], tuple[int, str]]


class Watch:
    """Bounds the waits of kernels for signals in one heap, and raises what they missed.

    On a CPU kernels run inside `over`, which raises what they missed. On a GPU they run later and the host does not
    wait for them: what they missed is raised by the first look that finds it. `over` looks without waiting;
    `check(wait=True)`, at the end of a step and where the heap is closed, waits for the current stream, so that no
    wait that ended early stays untold (`Heap.check`). The record itself names the signals that were waited for, since
    the host may have issued much more meanwhile.

    Attributes:
        bounds: for kernels (`fusedmoe.kernels.triton.one_sided.remote`), in memory that host and device share.
    """

    def __init__(self, heap: Heap) -> None:
        self._group, self._device = heap.group, heap.device
        memory = _shared(1 + RECORD, heap.device)
        self.stop, self.record = memory[:1], memory[1:]
        self.bounds = Bounds(self.stop, self.record, int(heap.group.job.timeout_s * 1e9))
        # By the address of the signals: the record of a kernel has it.
        self._names: dict[int, tuple[str, Name]] = {}
        self._looker: Helper | None = None
        heap.checks.append(partial(self.check, wait=True))

    def name(self, signals: Tensor, operation: str, name: Name) -> None:
        """Names signals for errors. `operation`: the one that waits for them."""
        self._names[signals.data_ptr()] = operation, name

    @contextmanager
    def over(self) -> Iterator[None]:
        """Wraps launches of kernels that wait for signals that have a name.

        Raises:
            RankError: a wait ended early, on a GPU perhaps one from before; it names rank, peer, part, expected and
                seen signal.
        """
        if self._group.size == 1 or self._device.type == "cuda":
            yield
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
        """Raises for a wait that has ended early until now.

        Args:
            wait: until the current stream of the device is done. Without it, and while a graph is captured, a later
                look tells of the waits of kernels that still run.
        """
        later = self._device.type == "cuda"
        if later and wait:
            _settle(self._device)
        if not self.record[0]:
            return
        # The reason is written first. All waits end now, and with them the kernel that writes the rest.
        if later and not _settle(self._device):
            return
        _, index, expected, seen, address = self.record.tolist()
        operation, name = self._names[address]
        place, part = name(index)
        peer = self._group.ranks[place]
        raise self._error(operation, peer, f"{part} of rank {peer}, expected signal {expected}, seen {seen}")

    def _look(self, done: threading.Event) -> None:
        """Polls the failure board while kernels run, and sets their stop flag. Ends when they have ended."""
        reason = _GONE  # where this thread fails, no other looks any more
        try:
            reason = self._reason_to_stop(done)
        finally:
            if reason:
                self.stop.fill_(reason)

    def _reason_to_stop(self, done: threading.Event) -> int:
        """Waits until kernels have ended; returns 0 then, and else why they must not wait any longer."""
        group, deadline = self._group, time.monotonic() + self._group.job.timeout_s
        peers = tuple(rank for rank in group.ranks if rank != group.job.rank)
        pause = 0.02  # most waits are short, and end without a look at the board
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

    def _error(self, operation: str, peer: int, missed: str) -> RankError:
        group, me = self._group, self._group.job.rank
        where = f"{operation} over the {group}: waiting for {missed}"
        board = group.job.board
        if board is None:
            return RankError(f"rank {me}: {where}; the peer never came within {group.job.timeout_s:.0f} s")
        verdict: object = board.explain()
        if verdict is None:
            peers = tuple(rank for rank in group.ranks if rank != me)
            if dead := board.gone(peers):
                verdict = board.post(dead[0], where, PROCESS_ENDED)
            else:
                text = (
                    f"it did not come within {group.job.timeout_s:.0f} s. {ORDER}; if one is slow, give Topology a "
                    "larger timeout_s"
                )
                verdict = board.blame(peer, where, text)
        return RankError(f"rank {me}: {where}; it ended because {verdict}")


def _shared(count: int, device: torch.device) -> Tensor:
    """Returns int64 zeros in memory that both the host and the device address."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def _settle(device: torch.device) -> bool:
    """Waits for the current stream of a GPU; False where it is being captured, and cannot be waited for."""
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():
            return False
    stream.synchronize()
    return True
