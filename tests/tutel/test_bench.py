"""The benchmark against Tutel, with stand-ins for it: one that is right, and one that is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_compares_and_checks() -> None:
    threads = torch.get_num_threads()
    try:
        found = compare(SimpleNamespace(moe_layer=Twice), "twice", SMALL, threads=1, rounds=3)
        assert found.ratio > 1 and found.theirs_s > found.ours_s > 0
        with pytest.raises(AssertionError):
            compare(SimpleNamespace(moe_layer=Wrong), "wrong", SMALL, threads=1, rounds=1)
    finally:
        torch.set_num_threads(threads)
