"""Bounds the waits of kernels: sets a word that they look at once a rank has failed or the time is up.

A kernel that waits for a peer cannot read the failure board, and in Triton's interpreter it has no clock. So while
kernels run that may wait, a thread of the host looks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fusedmoe.comm.failure import LOOK_S
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError
from fusedmoe.kernels.places import Bounds
from fusedmoe.kernels.remote import RECORD, TIME_IS_UP

_VERDICT, _GONE = 2, 3


class Missed(NamedTuple):
    """A wait that ended early. `peer`: place in the group; `part`: what of that peer was waited for, in words."""

    peer: int
    part: str
    expected: int
    seen: int


class Watch:
    """Of one heap's waits.

    Attributes:
        bounds: for kernels (`fusedmoe.kernels.remote`), in memory that host and device share.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        memory = torch.zeros(1 + RECORD, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.stop, self.record = memory[:1], memory[1:]
        self.bounds = Bounds(self.stop, self.record, int(group.job.timeout_s * 1e9))

    @contextmanager
    def over(self, operation: str, name: Callable[[int], tuple[int, str]]) -> Iterator[None]:
        """Around launches of kernels that wait. On a CPU they run inside; on a GPU `check` tells later of what failed.

        Args:
            operation: what they are part of.
            name: of the index of a signal: the peer's place in the group, and the part of its rows.
        Raises:
            RankError: a wait ended early; it names rank, peer, chunk, expected and seen signal.
        """
        if self._group.size == 1 or self.stop.is_pinned():
            yield
            self.check(operation, name)
            return
        done = threading.Event()
        looker = threading.Thread(target=self._look, args=(done,), name="fusedmoe-watch", daemon=True)
        looker.start()
        try:
            yield
        finally:
            done.set()
            looker.join()
        self.check(operation, name)

    def check(self, operation: str, name: Callable[[int], tuple[int, str]]) -> None:
        """Raises for a wait that has ended early until now."""
        reason, index, expected, seen = self.record.tolist()
        if reason:
            peer, part = name(index)
            raise self._error(operation, reason, Missed(peer, part, expected, seen))

    def _look(self, done: threading.Event) -> None:
        """Looks for the kernels. Ends when they have, or with what ends them."""
        group, deadline = self._group, time.monotonic() + self._group.job.timeout_s
        others = tuple(rank for rank in group.ranks if rank != group.job.rank)
        pause = 0.02  # most waits are short; nobody need be asked then
        while not done.wait(pause):
            pause = LOOK_S
            board = group.job.board
            if board is not None and board.read() is not None:
                reason = _VERDICT
            elif board is not None and board.gone(others):
                reason = _GONE
            elif time.monotonic() > deadline:
                reason = TIME_IS_UP
            else:
                continue
            self.stop.fill_(reason)
            return

    def _error(self, operation: str, reason: int, missed: Missed) -> RankError:
        group, me = self._group, self._group.job.rank
        peer = group.ranks[missed.peer]
        where = (
            f"{operation} over the {group}: waiting for {missed.part} of rank {peer}, "
            f"expected signal {missed.expected}, seen {missed.seen}"
        )
        board = group.job.board
        if board is None:
            return RankError(f"rank {me}: {where}; the peer never came within {group.job.timeout_s:.0f} s")
        if (verdict := board.read()) is None:
            others = tuple(rank for rank in group.ranks if rank != me)
            if dead := board.gone(others):
                text = "its process ended (an error, killed, or out of memory); see its log"
                verdict = board.post(dead[0], where, text)
            else:
                text = (
                    f"it did not come within {group.job.timeout_s:.0f} s. Every rank of a group must call the same "
                    "operations in the same order; if one is slow, give Topology a larger timeout_s"
                )
                verdict = board.post(peer, where, text)
        return RankError(f"rank {me}: {where}; it ended because {verdict}")
