"""Whoever asks the job's store waits no longer than a bound, and a process has one line to it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist

from fusedmoe.comm.failure import store_line
from fusedmoe.comm.failure.board import Board
from fusedmoe.comm.failure.store_line import StoreLine, line_to
from fusedmoe.errors import RankError
from tests.cluster import open_sockets

T = TypeVar("T")


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a question waits for, and a short patience."""
    monkeypatch.setattr(store_line, "PATIENCE_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


def soon(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_store_that_does_not_answer_and_then_does(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    line = StoreLine(dist.HashStore())
    asked: list[int] = []
    begin = line._helper.begin

    def slowly(question: Callable[[], T]) -> Future[T]:
        future = begin(question)
        time.sleep(0.03)  # a machine that is short of time starts a thread so late
        return future

    monkeypatch.setattr(line._helper, "begin", slowly)
    assert line.ask(lambda _: stuck.wait(), 0.05) is None
    assert line.ask(lambda _: asked.append(1), 0.01) is None
    assert line.trouble.startswith("no answer for ")
    stuck.set()
    assert soon(lambda: line.ask(lambda _: "here") == "here")
    assert line.trouble == line.broke == ""


def test_a_store_without_a_second_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails with, also the second question has no answer."""

    def none(*_: object) -> None:
        raise MemoryError("for a socket")

    monkeypatch.setattr(store_line, "_second", none)
    line = StoreLine(dist.HashStore())
    assert [line.ask(lambda _: "here") for _ in range(2)] == [None, None]
    assert line.broke == "the connection to it broke: MemoryError: for a socket"


@pytest.mark.slow
def test_its_host_is_named(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    board = Board(store, 3)
    line_to(store).ask(lambda _: stuck.wait(), 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = board.blame(2, "all-to-all", "it did not come")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with pytest.raises(RankError, match="rank 3: meeting ended because rank 0 failed in hosting the job's store: no "):
        board.meet([2, 3], None, 0.1, operation="meeting")
    assert agent.startswith("torchrun on the host of rank 0 failed in hosting the job's store: no answer for ")
    assert board.read() is None and not board.waiting([2])[2].operation
    stuck.set()
    assert soon(lambda: board.read() is None and not line_to(store).trouble)
    assert board.blame(2, "all-to-all", "it did not come") == "rank 2 failed in all-to-all: it did not come"


def test_a_line_that_breaks_is_asked_no_more() -> None:
    line, asked = StoreLine(dist.HashStore()), []

    def breaks(_: dist.Store) -> None:
        asked.append(1)
        raise dist.DistNetworkError("Connection reset by peer")

    assert line.ask(breaks) is None and line.ask(breaks) is None
    assert asked == [1] and line.broke == line.trouble == "the connection to it broke: Connection reset by peer"


def lines() -> int:
    return sum(thread.name == "fusedmoe-store" for thread in threading.enumerate())


def test_a_line_that_nobody_has_asked_ends_with_its_store() -> None:
    gc.collect()
    assert soon(lambda: lines() == 0), "what other tests left has ended"
    store = dist.HashStore()
    board = Board(store, 1)
    assert lines() == 1
    del board, store
    gc.collect()
    assert soon(lambda: lines() == 0)


def test_one_line_that_ends_with_its_store() -> None:
    gc.collect()
    assert soon(lambda: lines() == 0), "what other tests left has ended"
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = open_sockets()
    stores = [dist.PrefixStore("a job", host), dist.PrefixStore("another", dist.PrefixStore("within", host))]
    boards = [Board(store, 1) for store in stores for _ in range(3)]
    assert all(board.read() is None for board in boards)
    boards[0].post(boards[0].rank, "a test", "it failed")
    assert [board.read() is None for board in boards] == [False] * 3 + [True] * 3, "jobs do not read of each other"
    assert lines() == 1 and open_sockets() == before + 2, "the server's end is here, too"
    del boards
    assert Board(stores[0], 2).read() is not None and lines() == 1
    del stores, host
    assert soon(lambda: lines() == 0)


@pytest.mark.slow
def test_a_host_that_is_gone_before_the_first_question() -> None:
    """The connection is tried again for no longer than the answer is waited for, whatever the store's own time-out."""
    assert soon(lambda: lines() == 0), "what other tests left has ended"
    host: dist.Store | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(minutes=30))  # type: ignore[union-attr]
    board = Board(client, 1)
    del host
    with pytest.raises(RankError, match="rank 1: meeting ended because rank 0 failed in hosting the job's store"):
        board.meet([0, 1], None, 0.5, operation="meeting")
    del board, client
    assert soon(lambda: lines() == 0)


def test_an_error_that_comes_late_keeps_nothing(stuck: threading.Event) -> None:
    """The question has a bound; what the client raises long after it must not hold on to who asked."""

    def breaks(_: dist.Store) -> None:
        stuck.wait()
        raise dist.DistNetworkError("Connection reset by peer")

    store = dist.HashStore()
    board = Board(store, 3)
    assert board._ask(breaks, 0.05) is None
    gone = weakref.ref(board)
    stuck.set()
    del board, store
    assert soon(lambda: gc.collect() >= 0 and gone() is None)
