"""The GPUs whose kernels' times are forecast."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """A Hopper GPU.

    Attributes:
        flops_per_s: of a large product in bfloat16, power limit and all: not what the data sheet has.
        bytes_per_s: of a large copy, read and written.
        cache_bytes_per_s: from the L2 cache to all multiprocessors. Nobody has measured it here; the Triton form drew
            9.2 TB/s from it at its best, and this is a little more.
        clock_hz: under load, by which what a multiprocessor does beside its tensor cores is counted.
    """

    name: str
    multiprocessors: int
    flops_per_s: float
    bytes_per_s: float
    cache_bytes_per_s: float = 10.5e12
    clock_hz: float = 1.7e9


# By bench/results: the ceilings of its runs.
H100 = Gpu("H100", 132, 794e12, 3.03e12)
# As expected, not measured here: the same tensor cores with faster memory.
H200 = Gpu("H200", 132, 790e12, 4.3e12)
GPUS = {"h100": H100, "h200": H200}
