"""One layer's pass: orders of its chunks, its duration, and the best number of chunks.

An order function returns the task order of each resource for one layer and pass:

    three_queues    inter D0 D1 AR0 C0 C1    intra AG0 AG1 RS0 RS1     (FSMoE Fig. 3d)
    alternating     inter D0 D1 D2 AR0 C0 C1 C2    intra AG0 AG1 RS0 AG2 RS1 RS2
    one_queue       inter D0 AG0 D1 AG1 AR0 RS0 C0 RS1 C1              (one communication queue: Tutel, PipeMoE)

A pass is simulated unless its duration has a closed form. In these, D, AG, X, RS, C are the seconds of one chunk's
dispatch, all-gather, expert, reduce-scatter and combine, and gar those of the gradient all-reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, StageTime, chunk_times, pass_bound_s
from fusedmoe.schedule.task import LINKS, PIPELINE, Task, TaskKind

Orders = dict[str, list[Task]]
TaskOrder = Callable[[Collection[str], int, str, int, Iterable[Task]], Orders]


def three_queues(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Return an order in which intra-node and inter-node collectives run concurrently, each in its own queue.

    Args:
        kinds: kinds of tasks that the layer has, out of `PIPELINE`.
        degree: number of chunks.
        buckets: gradient all-reduces, between the dispatches and the combines.
    """
    there, gathered, experts, reduced, back = _chunk_tasks(kinds, degree, phase, layer)
    return {"compute": experts, "intra": gathered + reduced, "inter": [*there, *buckets, *back]}


def alternating(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Return the order of `three_queues`, but each reduce-scatter follows the next chunk's all-gather."""
    there, gathered, experts, reduced, back = _chunk_tasks(kinds, degree, phase, layer)
    # If intra-node links are the bottleneck, the last all-gather delays no ready chunk.
    intra = [*gathered[:1], *_interleave_tasks(gathered[1:], reduced[:-1]), *reduced[-1:]]
    return {"compute": experts, "intra": intra, "inter": [*there, *buckets, *back]}


def one_queue(
    kinds: Collection[str], degree: int, phase: str = "forward", layer: int = 0, buckets: Iterable[Task] = ()
) -> Orders:
    """Return an order in which collectives never overlap: all are in one queue, each all-gather after its dispatch."""
    there, gathered, experts, reduced, back = _chunk_tasks(kinds, degree, phase, layer)
    return {
        "compute": experts,
        "inter": [*_interleave_tasks(there, gathered), *buckets, *_interleave_tasks(reduced, back)],
    }


def _chunk_tasks(kinds: Collection[str], degree: int, phase: str, layer: int) -> list[list[Task]]:
    return [[Task(part, chunk, layer, phase) for chunk in range(degree) if part in kinds] for part in PIPELINE]


def _interleave_tasks(first: list[Task], second: list[Task]) -> list[Task]:
    if not (first and second):
        return first or second
    return [task for pair in zip(first, second, strict=True) for task in pair]


def three_queues_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """Return the seconds T(r) of `three_queues` without contention; exact."""
    # The longest path makes r − 1 steps from one chunk to the next, all on the resource with the longest task. Only the
    # path through gar, and that from the last all-gather to the first reduce-scatter, pass over the chunks twice.
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(
        r * (d + c) + gar,
        chain + (r - 1) * (max(d, ag) + max(rs, c)),
        chain + x + (r - 1) * max(d, ag, x, rs, c),
    )


def one_queue_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """Return the seconds of `one_queue` without contention; exact."""
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(r * chain + gar, chain + x + (r - 1) * max(d + ag, x, rs + c))


class DegreeChoice(NamedTuple):
    """A number of chunks, and the duration of the pass with it."""

    degree: int
    seconds: float


def choose_degree(
    chunks: Mapping[str, StageTime],
    gar: float = 0.0,
    *,
    order: TaskOrder = three_queues,
    contention: Contention = NO_CONTENTION,
    max_degree: int = MAX_DEGREE,
    least: int = 1,
) -> DegreeChoice:
    """Return the number of chunks from `least` to `max_degree` with the shortest pass; ties go to the smallest.

    `chunks`: time of each part, by kind. `gar`: seconds of all-reduces. Raises `ConfigError` if `max_degree` < 1.
    """
    if max_degree < 1:
        raise ConfigError(f"choose_degree: max_degree must be at least 1, not {max_degree}")

    def bound_s(degree: int) -> float:
        times = chunk_times(chunks, degree)
        lower_s = pass_bound_s(degree, times, gar, contention)
        # Valid with contention, which only lengthens a pass.
        return max(lower_s, three_queues_s(degree, times, gar)) if order is three_queues else lower_s

    # By increasing lower bound, until it exceeds the best time. A closed form is as cheap as a bound.
    closed = _has_closed_form(order, contention)
    bounds_s = {degree: 0.0 if closed else bound_s(degree) for degree in range(least, max_degree + 1)}
    choices: list[DegreeChoice] = []
    best_s = math.inf
    for degree in sorted(bounds_s, key=bounds_s.__getitem__):
        if bounds_s[degree] > best_s * (1 + ROUNDING):
            break
        choices.append(DegreeChoice(degree, pass_s(chunks, degree, gar, order=order, contention=contention)))
        best_s = min(best_s, choices[-1].seconds)
    return min(choice for choice in choices if choice.seconds <= best_s * (1 + ROUNDING))


def pass_s(
    chunks: Mapping[str, StageTime],
    degree: int,
    gar: float = 0.0,
    *,
    order: TaskOrder = three_queues,
    contention: Contention = NO_CONTENTION,
) -> float:
    if _has_closed_form(order, contention):
        closed_s = one_queue_s if order is one_queue else three_queues_s
        return closed_s(degree, chunk_times(chunks, degree), gar)
    plan = _make_pass_plan(order, tuple(chunks), degree, gar > 0)
    of = {kind: part.seconds(degree) for kind, part in chunks.items()} | {TaskKind.GRADIENT_ALL_REDUCE: gar}
    return makespan(plan, TaskDurations({task: of[task.kind] for task in plan}, contention))


def _has_closed_form(order: TaskOrder, contention: Contention) -> bool:
    if order is one_queue:
        return not any(contention.slows_any(("compute", link)) for link in LINKS.values())
    return order is three_queues and contention == NO_CONTENTION


@lru_cache(maxsize=1024)
def _make_pass_plan(order: TaskOrder, kinds: tuple[str, ...], degree: int, with_gradient: bool) -> Plan:
    buckets = [Task(TaskKind.GRADIENT_ALL_REDUCE, 0, 1, "backward")] if with_gradient else []
    return Plan.from_orders(order(kinds, degree, "backward", 0, buckets))


class GradientPartition(NamedTuple):
    """Gradient bytes reduced in the middle of each layer's backward pipeline, and alongside its dense part.

    Only gradients of later layers are complete by then, so the last layer reduces nothing. The rest is reduced at the
    end.

    Attributes:
        pipeline_bytes: by layer, reduced between the last dispatch and the first combine; 0: no bucket.
        dense_bytes: by layer, reduced after the last combine.
    """

    pipeline_bytes: tuple[float, ...]
    dense_bytes: tuple[float, ...]
