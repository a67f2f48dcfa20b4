"""What ranks do in long runs: `fusedmoe train` with faults at steps, and many of everything in one process."""

from __future__ import annotations

import gc
import io
import os
import random
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from fusedmoe.cli import train
from fusedmoe.cli.main import main
from fusedmoe.cli.trainer import Trainer
from fusedmoe.training import load_checkpoint, save_checkpoint
from tests.chaos.jobs import Rank, Spec
from tests.chaos.ranks import held


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill_disk() -> None:
    """From now on no file gets longer than a block."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[], None]] = {"kill": _kill, "disk full": _fill_disk, "pause": _pause}


def train_with_fault(rank: int, world: int, arguments: list[str], fault: str, culprit: int, step: int) -> int:
    """The command on this rank; the fault comes on rank `culprit` in the step of that number of this run, from 1."""
    out, done, plain, end = io.StringIO(), 0, Trainer.step, resource.RLIM_INFINITY

    def faulty(trainer: Trainer, number: int) -> Any:
        nonlocal done
        done += 1
        if rank == culprit and done == step and fault:
            FAULTS[fault]()
        return plain(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        patch.setattr(train, "process_group", lambda *given: nullcontext())  # ranks of a cluster have theirs
        patch.setattr(Trainer, "step", faulty)
        try:
            with redirect_stdout(out), redirect_stderr(out):
                return main(["train", *arguments])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (end, end))


def live_long(rank: int, world: int, folder: str, rounds: int) -> list[tuple[Counter[str], int]]:
    """Rounds of ten steps, a topology, a plan, now and then a checkpoint, loaded again; what is held after some."""
    found = []
    rng = random.Random(rank)
    for number in range(rounds):
        layout = ("ep 2", "esp 2", "chunks 2", "blocks 2")[number % 4]
        counts = tuple(tuple(rng.randint(1, 9) for _ in range(10)) for _ in range(world))
        spec = Spec("plan" if number % 4 < 2 else "train", layout, number, counts, folder=folder, timeout_s=60.0)
        job = Rank(rank, spec)
        job.run()
        if number % 4 == 0:
            where = Path(folder, "checkpoint"), job.model, job.optimizer, job.topology
            save_checkpoint(*where)
            load_checkpoint(*where)
        job.topology.close()
        del job
        if number % max(1, rounds // 4) == rounds // 4 - 1:
            gc.collect()
            found.append((held(), _resident_bytes()))
    return found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
