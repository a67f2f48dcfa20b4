"""Agreement between the ranks that run a captured graph together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from fusedmoe.comm.failure.board import Board
from fusedmoe.compat.torch import default_store, group_named
from fusedmoe.errors import ConfigError, RankError

_PLANNING = "planning a captured graph"
_CURE = (
    "every rank must compile the same graphs in the same order: where sizes differ between ranks or change, "
    "mark these dimensions as dynamic on all of them"
)

T = TypeVar("T")


class GraphRanks:
    """Ranks that run a graph together. All methods but `run_guarded` are collective.

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
        self.timeout_s = timeout_s
        # Through the job's store: messages in the graph's groups would mix with those of a different graph.
        self._board = None if len(self.ranks) < 2 else Board(default_store(), self._rank)

    def all_gather(self, text: str, operation: str = _PLANNING) -> list[str]:
        """All-gather a text in the order of `ranks`. Raises `RankError` if a rank failed or timed out."""
        if self._board is None:
            return [text]
        return self._board.all_gather_json(self.ranks, text, self.timeout_s, operation=operation, cure=_CURE)

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


def resolve_group(group: Any) -> Any:
    return group_named(group) if isinstance(group, str) else group
