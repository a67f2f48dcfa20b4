"""Clock of steps on a GPU: events, medians, turns, and nothing left in the caches.

A clock is anything with `measure(steps, seconds)`; tests have one that needs no GPU.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

# Reading this much leaves nothing else in the L2 cache: several times that of any GPU so far.
_FLUSH_BYTES = 256 * 2**20
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
# A step that waits for the device would ask for ever more flushes.
_MOST_FLUSHES = 64


def nothing() -> None:
    return None


class Step(NamedTuple):
    """Step that is timed: `run(before())` without `before()`. `told`: what its results say besides, once it has run."""

    name: str
    run: Callable[[Any], object]
    before: Callable[[], Any] = nothing
    told: Callable[[], Mapping[str, object]] = dict


class Times(NamedTuple):
    """Milliseconds: the median, and between which a tenth of the runs is faster and a tenth slower."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Times:
        tenths = statistics.quantiles(samples_ms, n=10, method="inclusive")
        return cls(statistics.median(samples_ms), tenths[0], tenths[-1], len(samples_ms))


class Clock(Protocol):
    def measure(self, steps: Sequence[Step], seconds: float) -> dict[str, Times]:
        """Measures the times of the steps by name, in about so many seconds."""


class CudaClock:
    """Steps take turns, so that a change in the GPU's speed hits all of them.

    Before each run the L2 cache is filled with something else, by reading: what is written would still have to be
    written back while the step runs. That also gives the host a lead, long enough to launch the whole step, so that the
    time between the events is the GPU's and not the launches'; waits of a step for the device count.
    """

    def __init__(self, device: torch.device, tell: Callable[[str], object] = lambda step: None) -> None:
        """`tell`: is told of each step before it runs for the first time, when it may compile and tune for long."""
        self._tell = tell
        self._unrelated = torch.zeros(_FLUSH_BYTES // 4, device=device)
        self._sum = torch.zeros((), device=device)
        self._flush()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            self._flush()
        torch.cuda.synchronize()
        self._flush_s = (time.perf_counter() - start) / 20

    def measure(self, steps: Sequence[Step], seconds: float) -> dict[str, Times]:
        for step in steps:  # compiles
            self._tell(step.name)
            step.run(step.before())
        flushes = {step.name: self._lead(step) for step in steps}
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._round(steps, flushes)
        torch.cuda.synchronize()
        round_s = time.perf_counter() - start
        rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / round_s)))
        gc.collect()
        gc.disable()
        try:
            taken = [self._round(steps, flushes) for _ in range(rounds)]
            torch.cuda.synchronize()
        finally:
            gc.enable()
        return {
            step.name: Times.of([begin.elapsed_time(end) for begin, end in events])
            for step, events in zip(steps, zip(*taken, strict=True), strict=True)
        }

    def _lead(self, step: Step) -> int:
        """Returns so many flushes that they take longer than the host needs to launch the step."""
        prepared = step.before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step.run(prepared)
        launched_s = time.perf_counter() - start
        torch.cuda.synchronize()
        return min(_MOST_FLUSHES, 1 + math.ceil(1.5 * launched_s / self._flush_s))

    def _round(self, steps: Sequence[Step], flushes: dict[str, int]) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        taken = []
        for step in steps:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            prepared = step.before()
            for _ in range(flushes[step.name]):
                self._flush()
            begin.record()
            step.run(prepared)
            end.record()
            taken.append((begin, end))
            del prepared
        return taken

    def _flush(self) -> None:
        torch.sum(self._unrelated, dim=0, out=self._sum)
