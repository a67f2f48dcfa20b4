"""A process that ends, by an uncaught exception or a signal, is named by the other ranks."""

from __future__ import annotations

import atexit
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedmoe.comm.failure import blame
from fusedmoe.comm.failure import board as board_module
from fusedmoe.comm.failure.board import Board, post_uncaught_exceptions
from tests.comm.failing import SOON_S


def raise_lost_store(*_: object) -> None:
    raise torch.distributed.DistError("the store went down")


def test_uncaught_exception_is_posted_to_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda _: None)
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    boards = [Board(torch.distributed.HashStore(), rank) for rank in (3, 4)]
    for board in boards:
        post_uncaught_exceptions(board)
    hook, error = sys.excepthook, ValueError("lost")
    monkeypatch.setattr(boards[0], "post", raise_lost_store)
    hook(ValueError, error, None)
    assert seen == [error], "the traceback is printed as before, once"
    assert boards[0].read() is None
    assert str(boards[1].read()) == "rank 4 failed in the program: ValueError: lost"
    del board, boards
    hook(ValueError, error, None)
    assert seen == [error, error]


def test_store_host_waits_until_other_ranks_read_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that loses the store before reading the board would name the store's host instead of the faulty rank."""
    store = torch.distributed.HashStore()
    host, culprit, other = (Board(store, rank) for rank in range(3))
    with ThreadPoolExecutor(3) as pool:  # the ranks
        for ranks in (host, culprit, other):
            pool.submit(ranks.all_gather_json, range(3), None, 10.0)
    start = time.monotonic()
    host.wait_until_verdict_is_read(start + 100.0)
    assert time.monotonic() - start < 50, "nothing has happened"
    culprit.post(culprit.rank, "the program", "it failed")
    assert host.read() is not None
    start = time.monotonic()
    host.wait_until_verdict_is_read(start + 0.2)
    assert time.monotonic() - start >= 0.2, "one of them does not know yet"
    with ThreadPoolExecutor(1) as pool:
        lingers = pool.submit(host.wait_until_verdict_is_read, time.monotonic() + 100.0)
        assert not lingers.done() and other.read() is not None
        lingers.result(50)
    for board in (culprit, other):  # neither of them hosts it
        board.wait_until_verdict_is_read(time.monotonic() + 100.0)
    assert time.monotonic() - start < 50


def test_rank_joining_at_timeout_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank arrives between the last read and the check for missing ranks, which then finds no culprit."""
    store = torch.distributed.HashStore()
    board, other = Board(store, 0), Board(store, 1)
    get, comes = board._read_value, iter([True])

    def look(key: str) -> bytes | None:
        if next(comes, False):
            assert other.all_gather_json((0, 1), "late", 20.0) == ["early", "late"]
        return get(key)

    monkeypatch.setattr(board, "_read_value", look)
    passes = SimpleNamespace(monotonic=count(step=15).__next__, monotonic_ns=time.monotonic_ns, sleep=lambda _: None)
    monkeypatch.setattr(board_module, "time", passes)
    assert board.all_gather_json((0, 1), "early", 20.0) == ["early", "late"]


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class LostStoreBoard:
    """A board whose store is lost at `until_s`; no process has ended."""

    exit_s = 10.0
    rank = 1

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock, self._until_s = clock, until_s

    @property
    def is_disconnected(self) -> bool:
        return self._clock.now_s >= self._until_s

    def blame(self, rank: int, operation: str, message: str, is_absent: bool = False) -> str:
        return "rank 0 failed in hosting the job's store" if self.is_disconnected else f"rank {rank} failed"

    def final_verdict(self) -> None: ...

    def ended_ranks(self, ranks: tuple[int, ...]) -> list[int]:
        return []

    def record_wait(self, what: str, ranks: Any) -> None: ...

    def wait_notes(self, ranks: Any) -> dict[int, Any]:
        return {}


def test_wait_for_verdict_ends_when_store_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's host has left the job, but its process is alive."""
    for until_s, seconds in ((0.0, 1.0), (2.0, 3.0), (1000.0, 10.0)):
        clock = Clock()
        monkeypatch.setattr(blame, "time", clock)
        board: Any = LostStoreBoard(clock, until_s)
        text = str(blame.connection_lost_error(board, (0, 1), "adding", "the world group", "connection closed"))
        assert ("hosting the job's store" in text) == (until_s < 1000)
        assert abs(clock.now_s - seconds) < 0.1


SCRIPT = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from fusedmoe.comm.topology import Topology
from tests.comm.failing import make, train
rank, culprit, way, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
layer = make(Topology.from_sizes(3, timeout_s=4.0 if way == "stopped" else 300.0), experts=6)
train(layer, 3)
print("trained", flush=True)
if rank == culprit and way in ("killed", "stopped"):
    number = signal.SIGKILL if way == "killed" else signal.SIGSTOP
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    train(layer)
if rank == culprit and way == "stays":  # the interpreter waits for this thread
    threading.Thread(target=threading.Event().wait, args=(45,)).start()
if rank == culprit:
    raise ValueError("outside of any guard")
train(layer)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "culprit, way",
    [(1, "stays"), (0, "stays"), (1, "raises"), (0, "raises"), (0, "killed"), (0, "stopped"), (1, "stopped")],
)
def test_ended_process_is_named_by_other_ranks(culprit: int, way: str) -> None:
    """Separate processes, as a launcher starts them; rank 0 hosts the store, which dies or stops with it.

    They end although Gloo would wait for a living rank that owes them data.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(culprit), way, str(port)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "trained\n"
        start = time.monotonic()
        lives = way in ("stays", "stopped")
        errors = [
            "" if lives and rank == culprit else process.communicate(timeout=60)[1]
            for rank, process in enumerate(ranks)
        ]
        assert time.monotonic() - start < SOON_S
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, text in enumerate(errors):
        if rank != culprit:
            assert ranks[rank].returncode == 1
            last = text.strip().splitlines()[-1]
            assert f"RankError: rank {rank}: " in last, text
            assert re.search(f"rank {culprit} (failed in|did not join) ", last), text
            gone = "its process ended (an error, killed, or out of memory); see its log" in last
            told = "failed in the program: ValueError: outside of any guard" in last
            missed = "no answer for" in last if culprit == 0 else "not all ranks joined within 4 s" in last
            good = {"stays": told, "raises": told or gone, "killed": gone, "stopped": missed}
            assert good[way], text
    # PyTorch names shared memory by process.
    left = [name for name in os.listdir("/dev/shm") if any(f"_{process.pid}_" in name for process in ranks)]
    assert not left
