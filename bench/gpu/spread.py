"""Variants of layers over virtual ranks, and their parts. ranks.py implements them and requires Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.gpu.case import Case
from bench.gpu.clock import Step
from bench.gpu.costs import Cost
from bench.gpu.layer import Layer, Unavailable
from bench.gpu.shapes import Shape
from fusedmoe.kernels.backend import INTERPRET

COUNTS = (2, 4, 8)
#: Parts measured separately, and their number of ranks.
PARTS, PART_RANKS = ("dispatch by puts", "combine by puts"), 4

WAYS = ("puts", "copies")


def variants() -> dict[str, Callable[[Case], Layer]]:
    """Return both variants for each number of ranks, by name."""
    return {f"{count} ranks, {way}": partial(_layer, count, way) for count in COUNTS for way in WAYS}


def _layer(count: int, way: str, case: Case) -> Layer:
    shape = case.shape
    if not shape.spread:
        raise Unavailable("not spread over virtual ranks")
    if shape.E % count:
        raise Unavailable(f"{shape.E} experts cannot be shared evenly by {count} ranks")
    if not (case.x_SM.is_cuda or INTERPRET):
        raise Unavailable("needs a GPU, or Triton's interpreter")
    from bench.gpu.ranks import copies_layer, puts_layer

    layer = (puts_layer if way == "puts" else copies_layer)(case, count)
    return replace(layer, name=f"{count} ranks, {way}")


def part_costs(shape: Shape, itemsize: int) -> dict[str, Cost]:
    return dict.fromkeys(PARTS, Cost(0, (shape.S + shape.rows) * shape.M * itemsize)) if shape.spread else {}


def part_steps(case: Case) -> list[Step]:
    if not case.shape.spread:
        return []
    from bench.gpu import ranks

    return ranks.part_steps(case, PART_RANKS)
