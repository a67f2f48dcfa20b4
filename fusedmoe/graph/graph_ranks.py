"""Agreement between the ranks that run a captured graph together."""

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
from fusedmoe.threads import POLL_S

_PLANNING = "planning a captured graph"
_CURE = (
    "every rank must compile the same graphs in the same order: where sizes differ between ranks or change, "
    "mark these dimensions as dynamic on all of them"
)

# Seconds that a rank with a broken connection may take to report the reason.
_EXIT_S = 1.0

T = TypeVar("T")


class GraphRanks:
    """Ranks that run a graph together. All methods but `run_guarded` and `wait` are collective.

    Args:
        groups: process groups of the graph's collectives, or their names; at least one.
        timeout_s: seconds to wait for other ranks.
    Attributes:
        ranks: global ranks, ascending. If no group has all ranks of the groups, all ranks of the job.
        is_leader: whether this is the first rank, which decides.
    """

    def __init__(self, groups: Sequence[Any], timeout_s: float) -> None:
        members = [tuple(dist.get_process_group_ranks(resolve_group(group))) for group in groups]
        together = sorted({rank for ranks in members for rank in ranks})
        whole = any(set(ranks) == set(together) for ranks in members)
        self.ranks = together if whole else list(range(dist.get_world_size()))
        self._rank = dist.get_rank()
        self.is_leader = self._rank == self.ranks[0]
        self._timeout_s = timeout_s
        # Through the job's store: messages in the graph's groups would mix with those of a different graph.
        self._board = None if len(self.ranks) < 2 else Board(default_store(), self._rank)

    def all_gather(self, text: str, operation: str = _PLANNING) -> list[str]:
        """All-gather a text in the order of `ranks`. Raises `RankError` if a rank failed or timed out."""
        if self._board is None:
            return [text]
        return self._board.all_gather_json(self.ranks, text, self._timeout_s, operation=operation, cure=_CURE)

    def require_same(self, text: str) -> None:
        """Raise `RankError` on every rank unless all ranks pass the same text."""
        # Digests, because the store is slow.
        digests = self.all_gather(hashlib.sha256(text.encode()).hexdigest()[:16])
        odd = [rank for rank, digest in zip(self.ranks, digests, strict=True) if digest != digests[0]]
        if odd:
            raise RankError(
                f"{_PLANNING}: ranks {odd} captured a different graph than rank {self.ranks[0]}; {_CURE}, and "
                "all ranks must take the same control flow through the model"
            )

    def raise_findings(self, operation: str, findings: Sequence[str], cure: str) -> None:
        """Raise an error on every rank if any rank has findings: `RankError`, or `ConfigError` on a single rank."""
        texts = self.all_gather("; ".join(findings), operation)
        wrong = [f"rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True) if text]
        if wrong:
            message = f"captured graph, {operation}: {'. '.join(wrong)}. {cure}"
            raise ConfigError(message) if len(self.ranks) == 1 else RankError(message, agreed=True)

    def broadcast_decision(self, decide: Callable[[], Any]) -> Any:
        """Call `decide` on the first rank and return its JSON-serializable result on all. If it raises, all raise."""
        text = self.run_guarded(lambda: json.dumps(decide())) if self.is_leader else ""
        return json.loads(self.all_gather(text)[0])

    def run_guarded(self, run: Callable[[], T], operation: str = _PLANNING) -> T:
        """Return `run()`. If it raises, all other ranks raise at their next exchange."""
        try:
            return run()
        except BaseException as error:  # including interrupts, or the other ranks would time out
            if self._board is not None:
                self._board.post(self._rank, operation, f"{type(error).__name__}: {error}")
            raise

    def wait(self, work: dist.Work) -> None:
        """Wait at most `timeout_s` for a collective; NCCL's own watchdog bounds NCCL collectives.

        Raises `RankError` if a rank failed or timed out, or a connection broke.
        """
        if self._board is None or dist.get_backend() == "nccl":
            work.wait()
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            connection_error: RuntimeError | None = None
            try:
                work.wait(timedelta(seconds=POLL_S))
                return
            except RuntimeError:
                if work.is_completed():
                    try:
                        work.wait()
                        return
                    except RuntimeError as error:
                        connection_error = error
            verdict: Verdict | str | None = self._board.read(_EXIT_S if connection_error else 0.0)
            text = ""
            if verdict is None and connection_error:
                text = f"a connection to it broke ({connection_error}); see its log"
            elif verdict is None and time.monotonic() > deadline:
                text = f"did not come within {self._timeout_s:.0f} s; see its log, or {_CURE}"
            if text:
                others = tuple(rank for rank in self.ranks if rank != self._rank)
                missing = (self._board.ended_ranks(others) or self._board.absent_ranks(others) or others)[0]
                verdict = self._board.blame(missing, _PLANNING, text)
            if verdict is not None:
                raise RankError(f"rank {self._rank}: {_PLANNING} ended because {verdict}") from connection_error


def resolve_group(group: Any) -> Any:
    return group_named(group) if isinstance(group, str) else group
