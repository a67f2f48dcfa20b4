"""A group of ranks that communicate along one axis of the topology."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist

from fusedmoe.comm.failure import Board
from fusedmoe.errors import ConfigError, RankError


@dataclass(frozen=True)
class Job:
    """What every group of a job shares: this rank, how long a wait may last, where failures are posted.

    The board is None exactly in a world of one. `heaps`: symmetric memory of its groups that is in use
    (`fusedmoe.comm.heap`).
    """

    rank: int = 0
    timeout_s: float = 300.0
    board: Board | None = None
    heaps: WeakSet[Any] = field(default_factory=WeakSet, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (self.rank, self.timeout_s, self.board)  # heaps stay in their process


class Lease:
    """A process group, for as long as the topology that has leased it is open (`fusedmoe.comm.process_group`).

    `key`: by which the pool knows it: ranks and purpose, and the time-out.
    """

    def __init__(self, handle: dist.ProcessGroup, key: tuple[str, float] = ("", 0.0)) -> None:
        self._handle: dist.ProcessGroup | None = handle
        self.key = key

    @property
    def handle(self) -> dist.ProcessGroup:
        if self._handle is None:
            raise ConfigError(
                "this topology was closed, and its process groups are gone: use it before close(), or make another"
            )
        return self._handle

    def end(self) -> None:
        self._handle = None


@dataclass(frozen=True)
class Group:
    """Ranks along one axis.

    `ranks` are global, in the group's order; `index` is this rank's place among them; `lease` is of their process
    group, None exactly when the group has one rank (then every collective is a no-op and nothing needs initialising).
    `downward`: of a second process group of the same ranks, for rows to lower ones (see `duplex.py`); None without.
    """

    axis: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    lease: Lease | None = None
    job: Job = field(default_factory=Job)
    downward: Lease | None = None

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The process group; None for a group of one.

        Raises:
            ConfigError: the topology was closed.
        """
        return None if self.lease is None else self.lease.handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def board(self) -> Board:
        """The job's board, of a group that communicates."""
        assert self.job.board is not None
        return self.job.board

    def refuse(self, operation: str, text: str) -> NoReturn:
        """Raises what is wrong with this rank's part in an operation that has not begun, and tells the other ranks."""
        if self.job.board is None:
            raise ConfigError(f"{operation}: {text}")
        self.job.board.post(self.job.rank, operation, text)
        raise RankError(f"rank {self.job.rank}: {operation} over the {self}: {text}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # process groups cannot be copied

    def __str__(self) -> str:
        return f"{self.axis} group {list(self.ranks)}"
