"""A benchmark process: its clock, its time, what is left to do."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.gpu.clock import Clock, CudaClock
from bench.gpu.device import environment, state_under_load
from bench.gpu.limits import Ceilings, measure_ceilings
from bench.gpu.ours import NAME
from bench.gpu.results import complete
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.spool import Spool
from bench.gpu.suite import Row

# A shape is not begun with less: compiling and five rounds take about as long.
_LEAST_S = 4.0


class NotNow(Exception):
    """A shape that is left out; the text says why."""


class Session:
    """One GPU, `seconds` of time, shared out over the shapes that are left."""

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
        """The time that this shape may be measured for; as much again is for compiling and checking.

        Raises:
            NotNow: it has been measured already, no time is left, or it has hung before.
        """
        if self.spool.is_done(suite, shape.name):
            raise NotNow("measured already")
        hung = [work for work in self.spool.unfinished() if (work["suite"], work["shape"]) == (suite, shape.name)]
        if any(work["name"] in (suite, NAME) for work in hung):
            raise NotNow("the process ended here before")
        left = self._deadline - time.monotonic()
        if left < _LEAST_S:
            self.spool.add("skipped", suite=suite, shape=shape.name, name="*", word="no time left")
            raise NotNow("no time left")
        return 0.5 * left / (len(SHAPES) - SHAPES.index(shape))

    def add(self, suite: str, shape: Shape, rows: list[Row]) -> list[Row]:
        """Notes and shows rows; gives them with limits by the ceilings at the start."""
        for row in rows:
            self.spool.add("row", **row)
        self.spool.add("done", suite=suite, shape=shape.name)
        completed = [complete(row, self.ceilings) for row in rows]
        for row in completed:
            variant = f"{row['variant']} " if row["kind"] == "pass" else ""
            print(
                f"  {shape.name:12} {variant + row['name']:28} {row['measured_ms']:8.3f} ms,"
                f" limit {row['limit_ms']:7.3f}, {row['fraction']:4.0%} of it {row['tflops']:5.0f} TFLOP/s",
                flush=True,
            )
        return completed


def open_session(spool_file: Path | None, seconds: float) -> Session:
    """On the current GPU; `spool_file` takes what is found, and tells what has been found before."""
    device = torch.device("cuda", torch.cuda.current_device())
    return Session(device, CudaClock(device), Spool(spool_file), seconds)


def waiting(function: Callable[..., object]) -> Callable[..., None]:
    """The function with the device's work in it, for a host's clock."""

    def run(*arguments: object) -> None:
        function(*arguments)
        torch.cuda.synchronize()

    return run


@contextmanager
def nothing_kept() -> Iterator[None]:
    """An error leaves without the tensors of the functions it went through, which its traceback would keep alive."""
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
