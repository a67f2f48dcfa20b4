"""Ranks for tests: processes that live as long as the test session and run functions as a Gloo world on loopback.

Importing torch takes seconds, so one idle process imports it and ranks are forked from it. They are started once, and
each test borrows the number that it needs. A run is bounded in time; ranks that fail or hang are ended, and fresh ones
are started for the next test. Ranks end with the process that started them, in any state.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.lifetime import end_with

# Starting ranks is part of the first run: where ten processes share a core it has taken 80 s.
RUN_TIMEOUT_S = 180.0
MOST_THREADS = 60
# Modules that most ranks import. None of them starts a thread, for which forked processes would wait for ever.
_IMPORTED = (
    "tests.copied",
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "fusedmoe.training",
    "fusedmoe.cli.main",
)


class RankFailed(AssertionError):
    """Some rank raised; `errors` maps ranks to (type name, message, traceback text)."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, (_, _, text) in errors.items()))


@dataclass
class Outcome:
    """How a rank ended: a value, or an error as in `RankFailed`."""

    value: Any
    error: tuple[str, str, str] | None


class Cluster:
    """A pool of ranks. `run(world, function, *args)` calls `function(rank, world, *args)` on each rank."""

    def __init__(self) -> None:
        # By rank, which a process keeps: PyTorch caches coordinates by meshes, and those of all ranks are equal.
        self._workers: list[tuple[Any, Connection] | None] = []
        self._store: Any = None  # one for all runs: every new one costs connections
        self._runs = 0

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = RUN_TIMEOUT_S,
        most_threads: int = MOST_THREADS,
    ) -> list[Any]:
        """Return the functions' results in rank order.

        `function` must be defined at module level. Raises RankFailed with every rank's error, and if a rank keeps more
        than the allowed threads: each process group that is never freed keeps three.
        """
        outcomes = self.outcomes(world, function, *args, timeout_s=timeout_s, most_threads=most_threads)
        errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
        if errors:
            self.close()
            raise RankFailed(errors)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = RUN_TIMEOUT_S,
        most_threads: int = MOST_THREADS,
    ) -> list[Outcome]:
        """The same, for tests of failures: return how each rank ended, and replace only the ranks that have exited."""
        from torch.distributed import TCPStore

        self._workers += [None] * (world - len(self._workers))
        workers = [worker or start(_serve) for worker in self._workers[:world]]
        self._workers[:world] = workers
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs += 1
        for rank, (_, pipe) in enumerate(workers):
            pipe.send_bytes(pickle.dumps((sys.path, rank, world, self._store.port, self._runs)))
            pipe.send_bytes(pickle.dumps((function, args)))
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for rank, (process, pipe) in enumerate(workers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                outcomes.append(Outcome(None, ("TimeoutError", "", f"rank {rank} gave no answer within {timeout_s} s")))
                self._end(rank)
                continue
            try:
                ok, value, threads = pickle.loads(pipe.recv_bytes())
                if ok and threads > most_threads:
                    text = f"rank {rank} is left with {threads} threads, more than {most_threads}"
                    ok, value = False, ("TooManyThreads", text, text)
                outcomes.append(Outcome(value, None) if ok else Outcome(None, value))
                if threads > MOST_THREADS // 2:
                    # PyTorch keeps a graph, and so process groups, after FSDP and where a recomputation ends early.
                    self._end(rank)
            except EOFError:
                process.join(5)
                text = f"rank {rank} ended with exit code {process.exitcode}"
                outcomes.append(Outcome(None, ("ProcessDied", "", text)))
                self._end(rank)
        return outcomes

    def close(self) -> None:
        for rank in range(len(self._workers)):
            self._end(rank)

    def _end(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is None:
            return
        process, pipe = worker
        pipe.close()
        process.kill()
        process.join(10)
        self._workers[rank] = None


def start(serve: Callable[[Connection], None], *more: str) -> tuple[Any, Connection]:
    """Fork the process that has imported torch; return the copy, which runs `serve`, and the other end of its pipe.

    `more`: further modules to import there, if no copy has been started before.
    """
    context = get_context("forkserver")
    # Other libraries take seconds to import. Their tests, imported here before they run, import them.
    doors = [name for name in sys.modules if name.startswith("tests.integrations.test_")]
    context.set_forkserver_preload([*_IMPORTED, *doors, *more])
    ours, theirs = context.Pipe()
    # The fork server, which the first rank starts, keeps the environment of that moment for all ranks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests import copied

    end_with(copied.PID)

    torch.set_num_threads(1)
    gc.freeze()  # imports are permanent: garbage collection visits only objects of later runs
    server: Any = None
    while True:
        try:
            path, rank, world, port, number = pickle.loads(pipe.recv_bytes())
            sys.path[:] = path
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            return
        before = _threads()
        try:
            if server is None:
                server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
            store = dist.PrefixStore(f"run {number}", server)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            dist.barrier()  # a rank whose function ends at once closes connections that others may still be making
            torch.manual_seed(0)
            answer = (True, function(rank, world, *args))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if _threads() > before:
                # A group that an error or a cycle holds: freed on all ranks now, or it waits for its peers in a later
                # run.
                gc.collect()
        pipe.send_bytes(pickle.dumps((*answer, _threads())))


def open_sockets() -> int:
    """Of this process."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread has just closed it
            count += "socket" in os.readlink(fd)
    return count


def _threads() -> int:
    """The number of this process's threads, with native ones; where that is unknown, of Python's threads."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
