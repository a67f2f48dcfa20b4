"""The benchmark against Tutel, with stand-ins for it: one that is right, and one that is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import bench_tutel
from bench.bench_tutel import Shape, compare
from fusedmoe.tutel import moe

SMALL = Shape(S=64, M=16, H=32, E=4)


class Twice(moe.MOELayer):
    """Does its work twice."""

    def forward(self, *args: Any, **more: Any) -> Any:
        super().forward(*args, **more)
        return super().forward(*args, **more)


class Wrong(moe.MOELayer):
    def forward(self, *args: Any, **more: Any) -> Any:
        return super().forward(*args, **more) * 1.1


def test_compares_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, forward, calls = torch.get_num_threads(), moe.MOELayer.forward, [0]

    def counted(self: moe.MOELayer, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **more)

    def seconds(work: Callable[[], object]) -> float:
        before = calls[0]
        work()
        return float(calls[0] - before)

    monkeypatch.setattr(moe.MOELayer, "forward", counted)
    monkeypatch.setattr(bench_tutel, "seconds", seconds)  # a clock of calls
    try:
        found = compare(SimpleNamespace(moe_layer=Twice), "twice", SMALL, threads=1, rounds=3)
        assert (found.ours_s, found.theirs_s, found.ratio) == (1.0, 2.0, 2.0)
        with pytest.raises(AssertionError):
            compare(SimpleNamespace(moe_layer=Wrong), "wrong", SMALL, threads=1, rounds=1)
    finally:
        torch.set_num_threads(threads)
