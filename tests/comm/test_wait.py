"""Waiting for an operation that completes just as the wait times out."""

from __future__ import annotations

import gc
from collections import Counter
from datetime import timedelta
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from fusedmoe.comm import collectives
from fusedmoe.comm.failure.board import WaitNote
from fusedmoe.comm.group import Group, Job
from fusedmoe.errors import RankError
from fusedmoe.tutel.impls.communicate import start_swap


class Late:
    """A work that completes just after a timed wait; the next wait returns its result."""

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
    """The board of a job without failures."""

    standing_verdict = None
    exit_s = 10.0
    rank = 0

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.num_calls_by_operation: Counter[str] = Counter()

    def read(self) -> None:
        return None

    final_verdict = read

    def record_wait(self, what: str, ranks: object = ()) -> None:
        pass

    def ended_ranks(self, ranks: object) -> list[int]:
        return [1]

    def post(self, *verdict: Any) -> str:
        self.posted.append(verdict)
        return "rank 1 is gone"


def group(board: Board) -> Group:
    return Group("ep", (0, 1), job=Job(board=board))  # type: ignore[arg-type]


def test_late_completion_is_not_reported_as_failure() -> None:
    board = Board()
    collectives.wait(Late(None), group(board), "all-reduce")  # type: ignore[arg-type]
    assert not board.posted


def test_late_connection_error_raises_rank_error() -> None:
    board = Board()
    with pytest.raises(RankError, match="all-reduce over the ep group"):
        collectives.wait(Late("Connection closed by peer"), group(board), "all-reduce")  # type: ignore[arg-type]
    assert board.posted


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("stops", [False, True])
def test_slow_rank_is_not_reported_as_stopped(monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """Rank 1 waits elsewhere, on a machine busy enough that it renews its note only every 4 s."""
    clock = Clock()
    monkeypatch.setattr(collectives, "time", clock)

    class Busy(Board):
        def wait_notes(self, ranks: object) -> dict[int, WaitNote]:
            return {1: WaitNote("something else", int(min(clock.now_s, 30.0 if stops else 1e9) / 4 + 0.5))}

        def blame(self, rank: int, operation: str, text: str, is_absent: bool = False) -> str:
            assert is_absent and not text.endswith(".")
            return text

    class Unanswered(Late):
        def wait(self, timeout: timedelta | None = None) -> bool:
            clock.now_s += 0.25
            return super().wait(timeout)

        def is_completed(self) -> bool:
            return False

    said = "rank 1 was stopped while it waited for something else" if stops else "rank 1 waits for something else"
    with pytest.raises(RankError, match=f"not all ranks joined within 60 s: .*{said}"):
        waiting = Group("ep", (0, 1), job=Job(timeout_s=60.0, board=Busy()))  # type: ignore[arg-type]
        collectives.wait(Unanswered(None), waiting, "all-reduce")  # type: ignore[arg-type]
    assert 60.0 <= clock.now_s < 61.0


class NeverCompletes:
    """A process group operation that never completes."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def __call__(self, *arguments: Any, **options: Any) -> Late:
        self.held += [one for one in arguments if isinstance(one, torch.Tensor)]
        return Late("the connection broke")


class HoldsReference(torch.autograd.Function):
    """A node that references an object, as nodes of exchanges reference their group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, thing: object) -> torch.Tensor:
        ctx.thing = thing
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2, None


def test_pending_collective_holds_no_reference_to_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo releases it on a thread of the process group; that thread must not destroy the group."""
    never, job = NeverCompletes(), Job(board=Board())  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    group = Group("ep", (0, 1), 0, object(), job)  # type: ignore[arg-type]
    duplex = Group("ep", (0, 1), 0, object(), job, object())  # type: ignore[arg-type]
    for name in ("all_to_all_single", "all_reduce"):
        monkeypatch.setattr(dist, name, never)
    monkeypatch.setattr(collectives, "_all_gather_into_tensor", never)
    for call in (
        lambda rows: collectives.all_to_all_rows(group, rows, [2, 2], [1, 3]),
        lambda rows: collectives.all_to_all_rows(duplex, rows, [2, 2], [2, 2]),
        lambda rows: collectives.all_gather_rows(group, rows, [4, 4]),
        lambda rows: collectives.all_gather_rows(group, rows, [4, 2]),
        lambda rows: collectives.reduce_scatter_rows(group, rows, [2, 2]),
        lambda rows: collectives.all_reduce(group, rows),
        lambda rows: start_swap(group, rows)(),
    ):
        thing = NeverCompletes()
        known, before = ref(thing), len(never.held)
        with pytest.raises(RankError):
            call(HoldsReference.apply(torch.ones(4, 3, requires_grad=True), thing).view(4, 3, 1)[:, :, 0])
        del thing
        gc.collect()
        assert len(never.held) > before and known() is None
