"""Peak rates of a GPU, measured in the same run, and the resulting minimum time of work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from bench.gpu.clock import Clock, Step
from bench.gpu.costs import Cost


class Ceilings(NamedTuple):
    """P: bfloat16 matrix product rate; B: memory bandwidth (reads plus writes)."""

    flops_per_s: float
    bytes_per_s: float


def measure_ceilings(
    clock: Clock, device: torch.device, size: int = 8192, copied_bytes: int = 4 * 2**30, seconds: float = 1.0
) -> Ceilings:
    """Measure P by a product of [size, size] random matrices, and B by a copy."""
    a, b, c = (torch.randn((size, size), device=device, dtype=torch.bfloat16) for _ in range(3))
    source = torch.ones(copied_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = clock.measure(
        [Step("product", lambda _: torch.mm(a, b, out=c)), Step("copy", lambda _: target.copy_(source))], seconds
    )
    return Ceilings(
        2 * size**3 / (times["product"].median_ms / 1e3), 2 * copied_bytes / (times["copy"].median_ms / 1e3)
    )


def highest(ceilings: Iterable[Ceilings]) -> Ceilings:
    """Return the best of several measurements."""
    flops, moved = zip(*ceilings, strict=True)
    return Ceilings(max(flops), max(moved))


def limit_s(parts: Iterable[Cost], ceilings: Ceilings) -> float:
    """Return the minimum time in seconds of kernels in sequence: Σ max(FLOP / P, bytes / B)."""
    return sum(max(part.flops / ceilings.flops_per_s, part.bytes / ceilings.bytes_per_s) for part in parts)
