"""Waiting for an operation that ends just when the wait for it times out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fusedmoe.comm import collectives
from fusedmoe.comm.group import Group, Job
from fusedmoe.errors import RankError


class Late:
    """A work that a timed wait misses by a hair; the wait after that tells how it ended."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


class Board:
    """Of a job in which nobody failed."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def read(self) -> None:
        return None

    explain = read

    def waits(self, what: str, ranks: object = ()) -> None:
        pass

    def gone(self, ranks: object) -> list[int]:
        return [1]

    def post(self, *verdict: Any) -> str:
        self.posted.append(verdict)
        return "rank 1 is gone"


def group(board: Board) -> Group:
    return Group("ep", (0, 1), job=Job(board=board))  # type: ignore[arg-type]


def test_what_ended_well_is_no_failure() -> None:
    board = Board()
    collectives.wait(Late(None), group(board), "all-reduce")  # type: ignore[arg-type]
    assert not board.posted


def test_what_broke_is_one() -> None:
    board = Board()
    with pytest.raises(RankError, match="all-reduce over the ep group"):
        collectives.wait(Late("Connection closed by peer"), group(board), "all-reduce")  # type: ignore[arg-type]
    assert board.posted
