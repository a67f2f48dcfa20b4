"""How many chunks: the time of one layer's pass by its degree, and the degree that makes it shortest.

D, AG, X, RS, C are the seconds of one chunk's dispatch, all-gather, expert, reduce-scatter and combine, gar those of
the gradient all-reduces in the middle; `orders.py` says in which order they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule import orders
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import PIPELINE, Task
from fusedmoe.schedule.workload import Chunks

#: The largest degree that is tried, unless the caller says otherwise.
MAX_DEGREE = 16


class ChunkTimes(NamedTuple):
    """Seconds of each part of one chunk. A part that a layer does not have takes none."""

    dispatch: float = 0.0
    all_gather: float = 0.0
    expert: float = 0.0
    reduce_scatter: float = 0.0
    combine: float = 0.0


class Choice(NamedTuple):
    """A degree and the seconds that the pass takes with it."""

    degree: int
    seconds: float


def chunk_times(chunks: Mapping[str, Chunks], degree: int) -> ChunkTimes:
    """The times of one of `degree` chunks of a layer's pass (F9)."""
    return ChunkTimes(*(chunks[kind].seconds(degree) if kind in chunks else 0.0 for kind in PIPELINE))


def three_queues_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """T(r) of `orders.three_queues` without contention: exact for any times (F11).

    The pass takes as long as the longest path through its tasks, along chunks and along resources. A path has r − 1
    steps from a chunk to the next, all on the resource whose task is longest; only the path through gar, and the one
    that goes from the last all-gather to the first reduce-scatter, walk through the chunks twice.
    """
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(
        r * (d + c) + gar,
        chain + (r - 1) * (max(d, ag) + max(rs, c)),
        chain + x + (r - 1) * max(d, ag, x, rs, c),
    )


def one_queue_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """T(r) of `orders.one_queue`: exact for any times, by the same argument. Nothing there can contend."""
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(r * chain + gar, chain + x + (r - 1) * max(d + ag, x, rs + c))


#: Seconds of a pass: (degree, times of a chunk, gar).
PassTime = Callable[[int, ChunkTimes, float], float]

PASS_TIMES: Mapping[orders.Order, PassTime] = {
    orders.three_queues: three_queues_s,
    orders.one_queue: one_queue_s,
}


def choose_degree(
    chunks: Mapping[str, Chunks],
    gar: float = 0.0,
    *,
    order: orders.Order = orders.three_queues,
    contention: float = 1.0,
    limit: int = MAX_DEGREE,
) -> Choice:
    """The degree from 1 to `limit` with the shortest pass (F12); of several the smallest.

    Without contention by the closed form, for every degree. With it by simulation, degrees in the order of their
    closed form, up to the first whose closed form is no better than the best simulation: contention never makes a
    pass shorter, so neither this degree nor a later one can win.
    """
    if limit < 1:
        raise ConfigError(f"choose_degree: the limit must be at least 1, not {limit}")
    time = PASS_TIMES[order]
    free = [Choice(r, time(r, chunk_times(chunks, r), gar)) for r in range(1, limit + 1)]
    if contention == 1.0 or order is orders.one_queue:
        return min(free, key=lambda choice: choice.seconds)
    best: Choice | None = None
    for choice in sorted(free, key=lambda choice: choice.seconds):
        if best is not None and choice.seconds >= best.seconds:
            break
        seconds = pass_s(chunks, choice.degree, gar, order=order, contention=contention)
        if best is None or (seconds, choice.degree) < (best.seconds, best.degree):
            best = Choice(choice.degree, seconds)
    assert best is not None
    return best


def pass_s(
    chunks: Mapping[str, Chunks],
    degree: int,
    gar: float = 0.0,
    *,
    order: orders.Order = orders.three_queues,
    contention: float = 1.0,
) -> float:
    """Seconds of one layer's pass with this degree."""
    times = chunk_times(chunks, degree)
    if contention == 1.0 or order is orders.one_queue:
        return PASS_TIMES[order](degree, times, gar)
    plan = _pass_plan(order, tuple(kind for kind in PIPELINE if kind in chunks), degree, gar > 0)
    of = dict(zip(PIPELINE, times, strict=True)) | {"gradient-all-reduce": gar}
    return makespan(plan, Durations({task: of[task.kind] for task in plan}, contention))


@lru_cache(maxsize=256)
def _pass_plan(order: orders.Order, kinds: tuple[str, ...], degree: int, with_gradient: bool) -> Plan:
    pieces = [Task("gradient-all-reduce", 0, 1, "backward")] if with_gradient else []
    return Plan(**{resource: tuple(tasks) for resource, tasks in order(kinds, degree, "backward", 0, pieces).items()})
