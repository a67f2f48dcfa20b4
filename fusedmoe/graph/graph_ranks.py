"""The ranks that run a captured graph together, and what they tell each other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fusedmoe.comm.failure.board import Board, Verdict
from fusedmoe.compat.torch import default_store, group_named
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.threads import LOOK_S

_PLANNING = "planning a captured graph"
_CURE = (
    "every rank must compile the same graphs in the same order: where sizes differ between ranks or change, "
    "mark these dimensions as dynamic on all of them"
)

# How long a rank whose connection broke may take to say why.
_EXIT_S = 1.0

T = TypeVar("T")


class GraphRanks:
    """The ranks that run a graph together.

    Args:
        groups: the process groups of the graph's collectives, at least one, or their names.
        timeout_s: how long a rank waits for the others.
    Attributes:
        ranks: their numbers in the job.
        leader: whether this rank decides.
    """

    def __init__(self, groups: Sequence[Any], timeout_s: float) -> None:
        members = [tuple(dist.get_process_group_ranks(resolve(group))) for group in groups]
        together = sorted({rank for ranks in members for rank in ranks})
        # Groups that cross each other can touch all ranks, step by step.
        whole = any(set(ranks) == set(together) for ranks in members)
        self.ranks = together if whole else list(range(dist.get_world_size()))
        self._rank = dist.get_rank()
        self.leader = self._rank == self.ranks[0]
        self._timeout_s = timeout_s
        # They meet at the job's store. Nothing is sent over the process groups of the graph: a rank that captures a
        # graph which others do not is told so, and does not disturb what these send meanwhile.
        self._board = None if len(self.ranks) < 2 else Board(default_store(), self._rank)

    def all(self, text: str, operation: str = _PLANNING) -> list[str]:
        """Returns what each rank brings, in the order of `ranks`; `RankError` where one failed or did not come.

        Collective, as are the methods below.
        """
        if self._board is None:
            return [text]
        return self._board.meet(self.ranks, text, self._timeout_s, operation=operation, cure=_CURE)

    def require_same(self, text: str) -> None:
        """Raises `RankError`, on every rank, where they do not all bring the same text."""
        # The store carries little: graphs have thousands of lines.
        digests = self.all(hashlib.sha256(text.encode()).hexdigest()[:16])
        odd = [rank for rank, digest in zip(self.ranks, digests, strict=True) if digest != digests[0]]
        if odd:
            raise RankError(
                f"{_PLANNING}: ranks {odd} captured another graph than rank {self.ranks[0]}; {_CURE}, and let no "
                "rank take another way through the model"
            )

    def require_none(self, operation: str, findings: Sequence[str], cure: str) -> None:
        """Raises, on every rank, a `RankError` with what each rank has found wrong; on one rank a `ConfigError`."""
        texts = self.all("; ".join(findings), operation)
        wrong = [f"rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True) if text]
        if wrong:
            message = f"captured graph, {operation}: {'. '.join(wrong)}. {cure}"
            raise ConfigError(message) if len(self.ranks) == 1 else RankError(message, agreed=True)

    def from_first(self, decide: Callable[[], Any]) -> Any:
        """Returns what the first rank decides, as JSON can hold it; an exception there ends all ranks."""
        text = self.guarded(lambda: json.dumps(decide())) if self.leader else ""
        return json.loads(self.all(text)[0])

    def guarded(self, run: Callable[[], T], operation: str = _PLANNING) -> T:
        """Returns what `run` returns. An exception in it ends all ranks, at the next meeting."""
        try:
            return run()
        except BaseException as error:  # an interrupt, too: the others would wait until their time is up
            if self._board is not None:
                self._board.post(self._rank, operation, f"{type(error).__name__}: {error}")
            raise

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective of Gloo, `timeout_s` seconds at most; NCCL's watchdog bounds its own.

        Raises:
            RankError: a rank failed or did not come, or a connection broke.
        """
        if self._board is None or dist.get_backend() == "nccl":
            work.wait()
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            broke: RuntimeError | None = None
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    # It may have ended well between the time-out and this look.
                    try:
                        work.wait()
                        return
                    except RuntimeError as error:
                        broke = error
            said: Verdict | str | None = self._board.read(_EXIT_S if broke else 0.0)
            text = ""
            if said is None and broke:
                text = f"a connection to it broke ({broke}); see its log"
            elif said is None and time.monotonic() > deadline:
                text = f"did not come within {self._timeout_s:.0f} s; see its log, or {_CURE}"
            if text:
                # Who has ended, or else who waits for nobody.
                others = tuple(rank for rank in self.ranks if rank != self._rank)
                missing = (self._board.gone(others) or self._board.absent(others) or others)[0]
                said = self._board.blame(missing, _PLANNING, text)
            if said is not None:
                raise RankError(f"rank {self._rank}: {_PLANNING} ended because {said}") from broke


def resolve(group: Any) -> Any:
    """Returns the process group of that name; a process group is itself."""
    return group_named(group) if isinstance(group, str) else group
