"""A process that ends, by an exception that nobody catches or by a signal, is named by the others."""

from __future__ import annotations

import atexit
import os
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
from fusedmoe.comm.failure.board import Board, tell_others_of_uncaught
from tests.comm.failing import SOON_S


def lost_store(*_: object) -> None:
    raise torch.distributed.DistError("the store went down")


def test_what_nobody_catches_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda _: None)
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    boards = [Board(torch.distributed.HashStore(), rank) for rank in (3, 4)]
    for board in boards:
        tell_others_of_uncaught(board)
    hook, error = sys.excepthook, ValueError("lost")
    monkeypatch.setattr(boards[0], "post", lost_store)
    hook(ValueError, error, None)
    assert seen == [error], "the traceback is printed as before, once"
    assert boards[0].read() is None
    assert str(boards[1].read()) == "rank 4 failed in the program: ValueError: lost"
    del board, boards
    hook(ValueError, error, None)
    assert seen == [error, error]


def test_the_store_stays_until_the_others_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds no store, and has not looked at the board, would name its host instead of the rank at fault."""
    store = torch.distributed.HashStore()
    host, culprit, other = (Board(store, rank) for rank in range(3))
    with ThreadPoolExecutor(3) as pool:  # the ranks
        for ranks in (host, culprit, other):
            pool.submit(ranks.meet, range(3), None, 10.0)
    start = time.monotonic()
    host.linger(start + 100.0)
    assert time.monotonic() - start < 50, "nothing has happened"
    culprit.post(culprit.rank, "the program", "it failed")
    assert host.read() is not None
    start = time.monotonic()
    host.linger(start + 0.2)
    assert time.monotonic() - start >= 0.2, "one of them does not know yet"
    with ThreadPoolExecutor(1) as pool:
        lingers = pool.submit(host.linger, time.monotonic() + 100.0)
        assert not lingers.done() and other.read() is not None
        lingers.result(50)
    for board in (culprit, other):  # nobody else hosts it
        board.linger(time.monotonic() + 100.0)
    assert time.monotonic() - start < 50


def test_who_comes_at_the_last_moment_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look and the one for those who are missing, which finds nobody to blame."""
    store = torch.distributed.HashStore()
    board, other = Board(store, 0), Board(store, 1)
    get, comes = board._get, iter([True])

    def look(key: str) -> bytes | None:
        if next(comes, False):
            assert other.meet((0, 1), "late", 20.0) == ["early", "late"]
        return get(key)

    monkeypatch.setattr(board, "_get", look)
    passes = SimpleNamespace(monotonic=count(step=15).__next__, monotonic_ns=time.monotonic_ns, sleep=lambda _: None)
    monkeypatch.setattr(board_module, "time", passes)
    assert board.meet((0, 1), "early", 20.0) == ["early", "late"]


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Lonely:
    """A board whose store went when `until_s` had come; no process has ended."""

    exit_s = 10.0
    rank = 1

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock, self._until_s = clock, until_s

    @property
    def cut_off(self) -> bool:
        return self._clock.now_s >= self._until_s

    def blame(self, rank: int, operation: str, message: str) -> str:
        return "rank 0 failed in hosting the job's store" if self.cut_off else f"rank {rank} failed"

    def explain(self) -> None: ...

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        return []

    def waits(self, what: str, ranks: Any) -> None: ...

    def waiting(self, ranks: Any) -> dict[int, Any]:
        return {}


def test_nobody_is_waited_for_whose_word_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hosted the store has left the job, but its process goes on."""
    for until_s, seconds in ((0.0, 1.0), (2.0, 3.0), (1000.0, 10.0)):
        clock = Clock()
        monkeypatch.setattr(blame, "time", clock)
        board: Any = Lonely(clock, until_s)
        text = str(blame.lost(board, (0, 1), "adding", "the world group", "connection closed"))
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
def test_processes_that_end(culprit: int, way: str) -> None:
    """Processes of their own, as a launcher starts them; rank 0 hosts the store, which goes down, or stops, with it.

    They end although Gloo would have them wait for a rank that lives and owes them data.
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
            assert f"RankError: rank {rank}: " in last and f"rank {culprit} failed in" in last, text
            gone = "its process ended (an error, killed, or out of memory); see its log" in last
            told = "failed in the program: ValueError: outside of any guard" in last
            missed = "no answer for" in last if culprit == 0 else "not all ranks came within 4 s" in last
            good = {"stays": told, "raises": told or gone, "killed": gone, "stopped": missed}
            assert good[way], text
    # PyTorch names what it shares by process.
    left = [name for name in os.listdir("/dev/shm") if any(f"_{process.pid}_" in name for process in ranks)]
    assert not left
