"""GPU step timing: CUDA events, medians, interleaving, cold caches.

Tests use a `Clock` without a GPU.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from bench.gpu.monitor import monitored

# Reading this amount evicts the L2 cache: several times the size on any current GPU.
_FLUSH_BYTES = 256 * 2**20
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
_REST_S, _WARMUP_MS, _REPEATS_MS = 0.5, 5, 500
# Bound for steps that synchronise, for which more flushes never suffice.
_MOST_FLUSHES = 64


def nothing() -> None:
    return None


class Step(NamedTuple):
    """A step to time: `run(before())`, excluding `before()`. `told`: returns additional result fields after a run."""

    name: str
    run: Callable[[Any], object]
    before: Callable[[], Any] = nothing
    told: Callable[[], Mapping[str, object]] = dict


class Times(NamedTuple):
    """Milliseconds: median, 10th and 90th percentile."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Times:
        tenths = statistics.quantiles(samples_ms, n=10, method="inclusive")
        return cls(statistics.median(samples_ms), tenths[0], tenths[-1], len(samples_ms))


class Clock(Protocol):
    """`conditions`: the GPU's state during the last measurement, as result fields (`monitored`)."""

    conditions: Mapping[str, Any]

    def measure(self, steps: Sequence[Step], seconds: float) -> dict[str, Times]:
        """Return the times of the steps by name, measured for about `seconds`."""

    def mean_ms(self, run: Callable[[], object]) -> float:
        """Return the mean time of half a second of repeats after half a second of rest."""


class CudaClock:
    """Interleaves steps, so that drift of the GPU's speed affects all equally.

    Before each run, reads evict the L2 cache; writes would leave dirty lines to flush during the step. The reads also
    give the host enough lead to launch the whole step, so that event times exclude launch latency; synchronisation
    inside a step is included.
    """

    def __init__(self, device: torch.device, tell: Callable[[str], object] = lambda step: None) -> None:
        """`tell`: called with each step before its first run, which may compile and tune for long."""
        self._tell, self._device = tell, device
        self.conditions: Mapping[str, Any] = {}
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
        for step in steps:  # compile
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
            with monitored(self._device) as self.conditions:
                taken = [self._round(steps, flushes) for _ in range(rounds)]
                torch.cuda.synchronize()
        finally:
            gc.enable()
        return {
            step.name: Times.of([begin.elapsed_time(end) for begin, end in events])
            for step, events in zip(steps, zip(*taken, strict=True), strict=True)
        }

    def mean_ms(self, run: Callable[[], object]) -> float:
        from triton.testing import do_bench

        torch.cuda.synchronize()
        time.sleep(_REST_S)
        with monitored(self._device) as self.conditions:
            return float(do_bench(run, warmup=_WARMUP_MS, rep=_REPEATS_MS))

    def _lead(self, step: Step) -> int:
        """Return the number of flushes that take longer than the host needs to launch the step."""
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
