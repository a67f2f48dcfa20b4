"""Rank processes that execute runs in sequence over Gloo and save a record of each.

    python -m same_numbers.process FOLDER WORLD PORT RUN...

Started by `launch`, with the code under comparison on PYTHONPATH. Standard input is a pipe; when it closes, the ranks
exit.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedmoe

from .record import Record
from .runs import RUNS, Run, Skipped

TIMEOUT_S = 240


def execute(run: Run, rank: int, folder: Path) -> dict[str, Any]:
    """Return the saved content of a run: its record, or why there is none."""
    for package in run.needs:
        if find_spec(package) is None:
            return {"skipped": f"{package} is not installed"}
    torch.manual_seed(0)
    record = Record()
    scratch = folder / "scratch" / run.file
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        run.program()(record, rank, run.world, scratch, *run.arguments)
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception:
        return {"error": traceback.format_exc()}
    if not record:
        return {"error": "the run recorded nothing"}
    return {"record": dict(record)}


def end_with_launcher() -> None:
    """Exit immediately when the pipe from `launch` closes."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def serve(rank: int, folder: Path, world: int, port: int, runs: list[Run]) -> None:
    """Execute the runs as one rank, up to and including the first that fails."""
    end_with_launcher()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    for run in runs:
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        result = execute(run, rank, folder)
        result |= {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        path = folder / f"{run.file}-{rank}.pt"
        torch.save(result, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        if "error" in result:
            os._exit(1)  # other ranks may wait for this one
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Import once, fork the ranks, and wait for them."""
    folder, world, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    named = {run.name: run for run in RUNS}
    runs = [named[name] for name in sys.argv[4:]]
    tree = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    if not Path(fusedmoe.__file__).is_relative_to(tree):
        raise RuntimeError(f"fusedmoe was imported from {fusedmoe.__file__}, not from {tree}")
    for module in {run.program_name.split(".")[0] for run in runs}:
        import_module(f".programs_{module}", __package__)
    ranks = []
    for rank in range(world):
        if (process := os.fork()) == 0:
            try:
                serve(rank, folder, world, port, runs)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # library threads must not delay the exit
        ranks.append(process)
    return int(any([os.waitpid(process, 0)[1] for process in ranks]))


if __name__ == "__main__":
    sys.exit(main())
