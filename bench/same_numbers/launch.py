"""Start the ranks of one version of the library, restart them after a failure, and load their records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from .runs import Run

RUN_TIMEOUT_S = 300.0  # of a run that takes 15 s on idle cores
_GRACE_S = 5.0


@dataclass
class Version:
    """A version of the library: `tree` contains its package `fusedmoe`, `folder` its records."""

    name: str
    tree: Path
    folder: Path
    programs: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def execute(self, runs: Sequence[Run]) -> Iterator[str]:
        """Execute the runs, grouped by the kind of ranks they need; yield the name of each finished run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for (interpreted, world), group in groupby(runs, lambda run: (run.interpreted, run.world)):
            left = list(group)
            while left:
                for run in self._by_one_set_of_ranks(interpreted, world, tuple(left)):
                    left.remove(run)
                    yield run.name

    def _by_one_set_of_ranks(self, interpreted: bool, world: int, runs: Sequence[Run]) -> Iterator[Run]:
        """Execute runs up to and including the first that fails."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        environment = {
            **os.environ, "PYTHONPATH": f"{self.tree}{os.pathsep}{self.programs}", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "FUSEDMOE_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1",
            "TRITON_INTERPRET": "1" if interpreted else "0", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        log = (self.folder / f"log-{world}-{runs[0].file}.txt").open("wb")
        command = [sys.executable, "-m", "same_numbers.process", str(self.folder), str(world), str(store.port)]
        process = subprocess.Popen(
            [*command, *(run.name for run in runs)],
            env=environment, cwd=self.folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            for run in runs:
                self.results[run.name] = result = self._await(run, process, log.name)
                yield run
                if "error" in result:
                    return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            log.close()

    def _await(self, run: Run, process: subprocess.Popen[bytes], log: str) -> dict[str, Any]:
        """Wait for the records of all ranks, at most `RUN_TIMEOUT_S`, and only shortly after a rank failed."""
        paths = [self.folder / f"{run.file}-{rank}.pt" for rank in range(run.world)]
        deadline, failed = time.monotonic() + RUN_TIMEOUT_S, False
        while time.monotonic() < deadline and not all(path.exists() for path in paths):
            if not failed and (process.poll() is not None or any(map(_failed, paths))):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.02)
        saved = [torch.load(path, weights_only=True) if path.exists() else None for path in paths]
        for rank, one in enumerate(saved):
            if one is not None and "error" in one:
                return {"error": f"rank {rank}: {one['error']}"}
        if None in saved:
            tail = Path(log).read_bytes()[-2000:].decode(errors="replace")
            return {"error": f"no record from rank {saved.index(None)} within {RUN_TIMEOUT_S:.0f} s\n{tail}"}
        first: dict[str, Any] = saved[0]  # type: ignore[assignment]
        if "skipped" in first:
            return first
        record = {
            f"rank {rank}: {name}": tensor
            for rank, one in enumerate(saved)
            for name, tensor in one["record"].items()  # type: ignore[index]
        }
        return {"record": record, "seconds": first["seconds"], "cpu_s": sum(one["cpu_s"] for one in saved)}  # type: ignore[index]


def _failed(path: Path) -> bool:
    return path.exists() and "error" in torch.load(path, weights_only=True)
