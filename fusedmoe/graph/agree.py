"""How the ranks that run a graph come to one plan: they meet at the job's store, and the first of them decides.

Nothing is sent over the process groups of the graph: a rank that captures a graph which others do not is told so, and
does not disturb what these send meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fusedmoe.comm.failure import Board
from fusedmoe.errors import RankError

_OPERATION = "planning a captured graph"
_CURE = (
    "every rank must compile the same graphs in the same order: where sizes differ between ranks or change, mark these "
    "dimensions as dynamic on all of them"
)


class Meeting:
    """The ranks that run a graph together.

    Args:
        groups: the process groups of the graph's collectives, or their names.
        timeout_s: how long a rank waits for the others.
    Attributes:
        ranks: of the job; `leader`: whether this rank decides.
    """

    def __init__(self, groups: Sequence[Any], timeout_s: float) -> None:
        self.handles = [resolve(group) for group in groups]
        members = [tuple(dist.get_process_group_ranks(handle)) for handle in self.handles]
        together = sorted({rank for ranks in members for rank in ranks})
        # Groups that cross each other can touch all ranks, step by step.
        whole = any(set(ranks) == set(together) for ranks in members)
        self.ranks = together if whole or not groups else list(range(dist.get_world_size()))
        self._rank = dist.get_rank() if groups else 0
        self.leader = not groups or self._rank == self.ranks[0]
        self._timeout_s = timeout_s
        self._board = None if len(self.ranks) < 2 else Board(dist.distributed_c10d._get_default_store(), self._rank)

    def all(self, text: str) -> list[str]:
        """What each rank brings, in the order of `ranks`."""
        if self._board is None:
            return [text]
        return self._board.meet(self.ranks, text, self._timeout_s, operation=_OPERATION, cure=_CURE)

    def same(self, what: str) -> None:
        """Raises `RankError`, on every rank, where they do not all bring the same."""
        digests = self.all(hashlib.sha256(what.encode()).hexdigest()[:16])
        odd = [rank for rank, digest in zip(self.ranks, digests, strict=True) if digest != digests[0]]
        if odd:
            raise RankError(
                f"{_OPERATION}: ranks {odd} captured another graph than rank {self.ranks[0]}; {_CURE}, and let no "
                "rank take another way through the model"
            )

    def decided(self, decide: Callable[[], str]) -> str:
        """What the first rank decides. An exception there ends all ranks."""
        text = ""
        if self.leader:
            try:
                text = decide()
            except BaseException as error:
                if self._board is not None:
                    self._board.post(self._rank, _OPERATION, f"{type(error).__name__}: {error}")
                raise
        return self.all(text)[0]


def resolve(group: Any) -> Any:
    """The process group of that name; a process group is itself."""
    find: Any = dist.distributed_c10d._resolve_process_group
    return find(group) if isinstance(group, str) else group
