"""Requests to the job's store have a time bound, and a process has one client for it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch.distributed as dist

from fusedmoe.comm.failure import board as board_module
from fusedmoe.comm.failure import store_client
from fusedmoe.comm.failure.board import Board
from fusedmoe.comm.failure.store_client import StoreClient, shared_client
from fusedmoe.errors import RankError

T = TypeVar("T")


@pytest.fixture
def blocked_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that blocks requests, with a short time-out."""
    monkeypatch.setattr(store_client, "REQUEST_TIMEOUT_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


def becomes_true(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_store_client_recovers_after_unanswered_request(
    blocked_store: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = StoreClient(dist.HashStore())
    asked: list[int] = []
    begin = client._worker.submit

    def slowly(question: Callable[[], T]) -> Future[T]:
        future = begin(question)
        time.sleep(0.03)  # a loaded machine may start a thread this late
        return future

    monkeypatch.setattr(client._worker, "submit", slowly)
    assert client.request(lambda _: blocked_store.wait(), 0.05) is None
    assert client.request(lambda _: asked.append(1), 0.01) is None
    assert client.failure_reason.startswith("no answer for ")
    blocked_store.set()
    assert becomes_true(lambda: client.request(lambda _: "here") == "here")
    assert client.failure_reason == client.connection_error == ""


def test_failed_reconnect_disables_store_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any failure, the second request has no answer either."""

    def none(*_: object) -> None:
        raise MemoryError("for a socket")

    monkeypatch.setattr(store_client, "_open_second_connection", none)
    client = StoreClient(dist.HashStore())
    assert [client.request(lambda _: "here", 20) for _ in range(2)] == [None, None]
    assert client.connection_error == "the connection to it broke: MemoryError: for a socket"


def test_host_of_slow_store_is_not_blamed(blocked_store: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers late, after a rank has timed out waiting for another."""
    monkeypatch.setattr(board_module, "_MAX_STORE_SILENCE_S", 60.0)
    waits = SimpleNamespace(
        monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=lambda _: blocked_store.set()
    )
    monkeypatch.setattr(board_module, "time", waits)
    store = dist.HashStore()
    board = Board(store, 3)
    shared_client(store).request(lambda _: blocked_store.wait(), 0.05)
    assert shared_client(store).failure_reason
    assert board.blame(2, "all-to-all", "it did not come") == "rank 2 failed in all-to-all: it did not come"
    assert str(board.read()) == "rank 2 failed in all-to-all: it did not come"


@pytest.mark.slow
def test_host_of_unresponsive_store_is_named(blocked_store: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_MAX_STORE_SILENCE_S", 0.2)
    store = dist.HashStore()
    board = Board(store, 3)
    shared_client(store).request(lambda _: blocked_store.wait(), 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = board.blame(2, "all-to-all", "it did not come")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with pytest.raises(RankError, match="rank 3: meeting ended because rank 0 failed in hosting the job's store: no "):
        board.all_gather_json([2, 3], None, 0.1, operation="meeting")
    assert agent.startswith("torchrun on the host of rank 0 failed in hosting the job's store: no answer for ")
    assert board.read() is None and not board.wait_notes([2])[2].operation
    blocked_store.set()
    assert becomes_true(lambda: board.read() is None and not shared_client(store).failure_reason)
    assert board.blame(2, "all-to-all", "it did not come") == "rank 2 failed in all-to-all: it did not come"


def test_broken_connection_receives_no_further_requests() -> None:
    client, asked = StoreClient(dist.HashStore()), []

    def breaks(_: dist.Store) -> None:
        asked.append(1)
        raise dist.DistNetworkError("Connection reset by peer")

    assert client.request(breaks, 20) is None and client.request(breaks, 20) is None
    assert (
        asked == [1]
        and client.connection_error == client.failure_reason == "the connection to it broke: Connection reset by peer"
    )


def count_client_threads() -> int:
    return sum(thread.name == "fusedmoe-store" for thread in threading.enumerate())


def connections(port: int) -> int:
    """Count endpoints of connections to a port of this host."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    established, ours = "01", f":{port:04X}"
    return sum(row[3] == established and (row[1].endswith(ours) or row[2].endswith(ours)) for row in rows)


def test_unused_client_thread_ends_with_its_store() -> None:
    gc.collect()
    assert becomes_true(lambda: count_client_threads() == 0), "what other tests left has ended"
    store = dist.HashStore()
    board = Board(store, 1)
    assert count_client_threads() == 1
    del board, store
    gc.collect()
    assert becomes_true(lambda: count_client_threads() == 0)


def test_stores_share_one_client_which_ends_with_them() -> None:
    gc.collect()
    assert becomes_true(lambda: count_client_threads() == 0), "what other tests left has ended"
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = connections(host.port)
    stores = [dist.PrefixStore("a job", host), dist.PrefixStore("another", dist.PrefixStore("within", host))]
    boards = [Board(store, 1) for store in stores for _ in range(3)]
    assert all(board.read() is None for board in boards)
    boards[0].post(boards[0].rank, "a test", "it failed")
    assert all(board.read(wait_s=20.0) is not None for board in boards[:3])
    assert all(board.read() is None for board in boards[3:]), "jobs do not read of each other"
    assert count_client_threads() == 1 and connections(host.port) == before + 2, "the server's end is here, too"
    del boards
    assert Board(stores[0], 2).read() is not None and count_client_threads() == 1
    del stores, host
    assert becomes_true(lambda: count_client_threads() == 0)


@pytest.mark.slow
def test_store_lost_before_first_request_times_out() -> None:
    """Reconnecting ends with the request's time-out, regardless of the store's own time-out."""
    assert becomes_true(lambda: count_client_threads() == 0), "what other tests left has ended"
    host: dist.Store | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(minutes=30))  # type: ignore[union-attr]
    board = Board(client, 1)
    del host
    with pytest.raises(RankError, match="rank 1: meeting ended because rank 0 failed in hosting the job's store"):
        board.all_gather_json([0, 1], None, 0.5, operation="meeting")
    del board, client
    assert becomes_true(lambda: count_client_threads() == 0)


def test_late_request_error_keeps_no_reference_to_caller(blocked_store: threading.Event) -> None:
    """The request has timed out; the client's later exception must not keep its caller alive."""

    def breaks(_: dist.Store) -> None:
        blocked_store.wait()
        raise dist.DistNetworkError("Connection reset by peer")

    store = dist.HashStore()
    board = Board(store, 3)
    assert board._call_store(breaks, 0.05) is None
    gone = weakref.ref(board)
    blocked_store.set()
    del board, store
    assert becomes_true(lambda: gc.collect() >= 0 and gone() is None)
