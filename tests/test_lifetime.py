"""Processes started by tests end when the tests are killed, even in the middle of native code."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.beside import Beside
from tests.cluster import MOST_THREADS, Cluster, RankFailed
from tests.lifetime import watch

ROOT = Path(__file__).parents[1]


def wait(folder: str, native: bool = True) -> None:
    """Take a lock, which is held while this process lives, report it, and never return."""
    part = Path(folder, f"{os.getpid()}.part")
    with part.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        part.rename(part.with_suffix(".there"))
        if native:
            ctypes.PyDLL(None).sleep(300)  # keeps the GIL: no Python code runs here any more
        time.sleep(300)


def of_cluster(rank: int, world: int, folder: str) -> None:
    wait(folder)


def ranks(folder: str) -> None:
    Cluster().run(2, of_cluster, folder)


def pool(folder: str) -> None:
    from bench.aot import compiling  # imports torch

    with compiling.processes(2) as processes:
        list(processes.map(wait, [folder] * 2))


def second_process(folder: str) -> None:
    file = Path(folder, "test_waits.py")
    file.write_text(f"from tests.test_lifetime import wait\ndef test_waits(): wait({folder!r})\n")
    Beside([str(file)]).reports("test_waits")


def watched(parent: int, folder: str) -> None:
    threading.Thread(target=watch, args=(parent,), daemon=True).start()
    wait(folder, native=False)


def watch_thread(folder: str) -> None:
    """As on systems without Linux's mechanism."""
    get_context("spawn").Process(target=watched, args=(os.getpid(), folder)).start()


def ended(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("ranks", 2),
        ("watch_thread", 1),
        pytest.param("pool", 2, marks=pytest.mark.slow),
        pytest.param("second_process", 1, marks=pytest.mark.slow),
    ],
)
def test_child_processes_end_with_parent(tmp_path: Path, how: str, count: int) -> None:
    if how != "watch_thread" and sys.platform != "linux":
        pytest.skip("a thread ends it, which native code keeps waiting")
    script = f"from tests import test_lifetime; test_lifetime.{how}({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    there: list[Path] = []
    try:
        deadline = time.monotonic() + 60
        while len(there) < count:
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
            there = list(tmp_path.glob("*.there"))
        assert not any(map(ended, there))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 60
        while not all(map(ended, there)):
            assert time.monotonic() < deadline, f"{sum(not ended(file) for file in there)} of {count} are still there"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
        for file in there:
            if not ended(file):
                os.kill(int(file.stem), signal.SIGKILL)


def leave_threads(rank: int, world: int, count: int) -> None:
    for _ in range(count if rank == 1 else 0):
        threading.Thread(target=time.sleep, args=(300,), daemon=True).start()


def test_leaked_threads_of_rank_are_reported(cluster: Cluster) -> None:
    cluster.run(2, leave_threads, MOST_THREADS // 3)
    with pytest.raises(RankFailed, match=r"^--- rank 1\nrank 1 is left with \d+ threads, more than 60$"):
        cluster.run(2, leave_threads, MOST_THREADS)
