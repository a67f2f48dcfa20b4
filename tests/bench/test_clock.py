"""GPU timing with counting events."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import clock
from bench.gpu.clock import CudaClock, Step, Times


def test_times_report_median_and_quantiles() -> None:
    found = Times.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median_ms, found.runs) == (3.0, 5)
    assert 1.0 <= found.low_ms < 2.0 and 4.0 < found.high_ms <= 5.0


def test_steps_alternate_with_cache_flush_and_untimed_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def step(name: str, ms: float) -> Step:
        def before() -> str:
            now[0] += 100
            return name

        def run(given: str) -> None:
            assert given == name
            log.append(name)
            now[0] += ms

        return Step(name, run, before)

    monkeypatch.setattr(clock, "_FLUSH_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    flush = CudaClock._flush

    def counted(self: CudaClock) -> None:
        flush(self)
        log.append("flush")
        now[0] += 10

    monkeypatch.setattr(CudaClock, "_flush", counted)
    watch = CudaClock(torch.device("cpu"))
    log.clear()
    times = watch.measure([step("a", 3.0), step("b", 7.0)], seconds=0.0)
    assert {name: (t.median_ms, t.runs) for name, t in times.items()} == {"a": (3.0, 5), "b": (7.0, 5)}
    runs = [entry for entry in log if entry != "flush"]
    assert runs == ["a", "b", "a", "b"] + ["a", "b"] * 6  # compile, host lead, a round to estimate its length, rounds
    in_turn = log[log.index("flush") :]
    assert all(in_turn[place - 1] == "flush" for place, entry in enumerate(in_turn) if entry != "flush")
