"""How many chunks: the degree that makes one layer's pass shortest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.chunks import Chunks
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.orders import Order, one_queue, three_queues
from fusedmoe.schedule.passes import chunk_times, one_queue_s, pass_bound_s, three_queues_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.task import Task

#: The largest degree that is tried, unless the caller says otherwise.
MAX_DEGREE = 16


class Choice(NamedTuple):
    """A degree and the seconds that the pass takes with it."""

    degree: int
    seconds: float


def choose_degree(
    chunks: Mapping[str, Chunks],
    gar: float = 0.0,
    *,
    order: Order = three_queues,
    contention: float = 1.0,
    limit: int = MAX_DEGREE,
) -> Choice:
    """The degree from 1 to `limit` with the shortest pass (F12); of several the smallest. `chunks`: of the parts that
    the layer has.

    By the closed form where there is one, for every degree. Otherwise by simulation, in the order of what a degree
    takes at least, up to the first where this is longer than the best one found: no later one can win.

    Raises `ConfigError` for a limit below 1.
    """
    if limit < 1:
        raise ConfigError(f"choose_degree: the limit must be at least 1, not {limit}")
    degrees = range(1, limit + 1)
    if order is one_queue or (order is three_queues and contention == 1.0):
        closed = one_queue_s if order is one_queue else three_queues_s
        return _smallest_of_best([Choice(r, closed(r, chunk_times(chunks, r), gar)) for r in degrees])
    least = [Choice(r, pass_bound_s(r, chunk_times(chunks, r), gar, contention)) for r in degrees]
    if order is three_queues:  # contention makes no pass shorter
        least = [Choice(r, max(seconds, three_queues_s(r, chunk_times(chunks, r), gar))) for r, seconds in least]
    found: list[Choice] = []
    best_s = math.inf
    for degree, seconds in sorted(least, key=lambda choice: choice.seconds):
        if seconds > best_s * (1 + ROUNDING):
            break
        found.append(Choice(degree, pass_s(chunks, degree, gar, order=order, contention=contention)))
        best_s = min(best_s, found[-1].seconds)
    return _smallest_of_best(found)


def _smallest_of_best(choices: Sequence[Choice]) -> Choice:
    best_s = min(choice.seconds for choice in choices)
    return min(choice for choice in choices if choice.seconds <= best_s * (1 + ROUNDING))


def pass_s(
    chunks: Mapping[str, Chunks],
    degree: int,
    gar: float = 0.0,
    *,
    order: Order = three_queues,
    contention: float = 1.0,
) -> float:
    """Seconds of one layer's pass with this degree."""
    if order is one_queue:
        return one_queue_s(degree, chunk_times(chunks, degree), gar)
    if order is three_queues and contention == 1.0:
        return three_queues_s(degree, chunk_times(chunks, degree), gar)
    plan = _pass_plan(order, tuple(chunks), degree, gar > 0)
    of = {kind: part.seconds(degree) for kind, part in chunks.items()} | {"gradient-all-reduce": gar}
    return makespan(plan, Durations({task: of[task.kind] for task in plan}, contention))


@lru_cache(maxsize=1024)
def _pass_plan(order: Order, kinds: tuple[str, ...], degree: int, with_gradient: bool) -> Plan:
    pieces = [Task("gradient-all-reduce", 0, 1, "backward")] if with_gradient else []
    return Plan.of(order(kinds, degree, "backward", 0, pieces))
