"""A benchmark process: its clock, time budget, and remaining work."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench.gpu.clock import Clock, CudaClock
from bench.gpu.device import environment, state_under_load
from bench.gpu.limits import Ceilings, measure_ceilings
from bench.gpu.notes import LOST, gpu_works
from bench.gpu.results import complete
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.spool import Spool
from bench.gpu.suite import Row

# Minimum time to start a shape; compiling and five rounds take about as long.
_LEAST_S = 4.0


class ShapeSkipped(Exception):
    """Raised if a shape is left out, with the reason."""


class Session:
    """One GPU and `seconds` of time, distributed over the remaining shapes."""

    def __init__(self, device: torch.device, clock: Clock, spool: Spool, seconds: float) -> None:
        self.device, self.clock, self.spool = device, clock, spool
        self._deadline = time.monotonic() + seconds
        if not self.spool.of("environment"):
            self.spool.add("environment", **environment(self.device))
        self.ceilings = self.measure_ceilings("start")

    def measure_ceilings(self, when: str) -> Ceilings:
        found = measure_ceilings(self.clock, self.device)
        self.spool.add("ceilings", when=when, **found._asdict(), **state_under_load(self.device))
        free_memory()
        return found

    def seconds_for(self, suite: str, shape: Shape) -> float:
        """Return the time for measuring this shape; as much again is for compiling and checking.

        Raises:
            ShapeSkipped: it is already measured, no time is left, or it has hung before and other shapes come first.
        """
        if not self.spool.is_open(suite, shape.name):
            raise ShapeSkipped("measured already, or given up")
        others = (other.name for other in SHAPES if other != shape)
        if self.spool.stops(suite, shape.name) and any(self.spool.is_fresh(suite, other) for other in others):
            raise ShapeSkipped("the process ended here before: once more when the others are done")
        left = self._deadline - time.monotonic()
        if left < _LEAST_S:
            self.spool.add("skipped", suite=suite, shape=shape.name, name="*", word="no time left")
            raise ShapeSkipped("no time left")
        return 0.5 * left / (len(SHAPES) - SHAPES.index(shape))

    @contextmanager
    def piece(self, suite: str, shape: Shape) -> Iterator[None]:
        """Context of all work on a shape. Failures are recorded.

        If the GPU is lost, the process ends without recording the end of the work, as for a hang; another process
        continues.
        """
        piece = {"suite": suite, "shape": shape.name, "name": suite}
        self.spool.add("begin", **piece)
        try:
            yield
        except Exception as error:
            if not gpu_works():
                pytest.exit(f"{shape.name}: {error}; the GPU takes no more work from this process", returncode=LOST)
            self.spool.add("failed", **piece, word=f"{type(error).__name__}: {error}"[:500])
            self.spool.add("end", **piece)
            raise
        self.spool.add("end", **piece)

    def add(self, suite: str, shape: Shape, rows: list[Row]) -> list[Row]:
        """Record and print rows, with limits by the initial ceilings."""
        for row in rows:
            self.spool.add("row", **row)
        self.spool.add("done", suite=suite, shape=shape.name)
        completed = [complete(row, self.ceilings) for row in rows]
        for row in completed:
            variant = {"kernel": "", "pass": f"{row['variant']} "}.get(row["kind"], f"{row['variant']} {row['kind']} ")
            print(
                f"  {shape.name:12} {variant + row['name']:28} {row['measured_ms']:8.3f} ms,"
                f" limit {row['limit_ms']:7.3f}, {row['fraction']:4.0%} of it {row['tflops']:5.0f} TFLOP/s",
                flush=True,
            )
        return completed


def open_session(spool_file: Path | None, seconds: float) -> Session:
    """Open a session on the current GPU; `spool_file` contains earlier results and receives new ones."""
    device, spool = torch.device("cuda", torch.cuda.current_device()), Spool(spool_file)
    return Session(device, CudaClock(device, lambda step: spool.add("sign", name=step)), spool, seconds)


def waiting(function: Callable[..., object]) -> Callable[..., None]:
    """Return the function followed by a device synchronisation, for a host clock."""

    def run(*arguments: object) -> None:
        function(*arguments)
        torch.cuda.synchronize()

    return run


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Release tensors that an exception's traceback would keep alive."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        raise


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
