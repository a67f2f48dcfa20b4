"""Simulator: predicted start and end of each task of a plan.

Concurrent tasks slow each other down by the contention (`cost.Contention`). A fused operation starts once it is next on
both of its resources, and occupies them until it ends.

The critical path leads from the task that ends last back to the task its start waited for, and so on. Only changes to
its tasks can shorten the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.task import PHASES, RESOURCES, WEIGHT_GRADIENTS, TaskKind, resources_of
from fusedmoe.schedule.timeline import Span, Timeline

#: Relative tolerance for equal times: sums in another order differ by less.
ROUNDING = 1e-9

_NUM_RESOURCES, _NEVER_S = len(RESOURCES), math.inf

#: Added to a task's resource index: the task starts only if its resource would be idle.
IDLE_ONLY = _NUM_RESOURCES

# Kinds on which no task of a later pass depends.
_KINDS_OUTSIDE_PASSES = frozenset((TaskKind.GRADIENT_ALL_REDUCE, *WEIGHT_GRADIENTS.values()))


def simulate(plan: Plan, costs: Costs, rank: int = 0) -> Timeline:
    """Return the predicted timeline of a plan, starting at 0.

    Raises `ConfigError` with the task's name if its duration is missing, negative or not finite.
    """
    starts, ends = _start_and_end_times(plan, costs)
    # An all-gather's span is intra-node even if one queue serves both links.
    occupied = (resources_of(task.kind) for task in plan.sequence)
    spans = tuple(
        Span(kind, kind, on[0], start, end, chunk, layer, phase, on[1:])
        for (kind, chunk, layer, phase, _), on, start, end in zip(plan.sequence, occupied, starts, ends, strict=True)
    )
    return Timeline(rank, spans, "predicted")


def makespan(plan: Plan, costs: Costs) -> float:
    """Return the end of the last task in seconds, faster than `simulate`."""
    return max(_start_and_end_times(plan, costs)[1], default=0.0)


def fastest_plan(plans: Sequence[Plan], costs: Costs) -> Plan:
    """Return the plan with the shortest simulated time; ties go to the fewest tasks."""
    seconds = [makespan(plan, costs) for plan in plans]
    enough_s = min(seconds) * (1 + ROUNDING)
    # Each task has an overhead beyond its costs.
    return min((plan for plan, took_s in zip(plans, seconds, strict=True) if took_s <= enough_s), key=len)


@dataclass(frozen=True)
class LayerPass:
    """One layer's pass in a predicted step, including its dense part, from the end of the previous pass.

    With micro-batches in several layers at once, work before `start_s` counts towards the previous pass, and a weight
    gradient towards the pass during which it runs.

    Attributes:
        critical_s: by resource, seconds of the critical path during the pass; they add up to its duration.
        gradient_s: seconds of gradient all-reduces during the pass, overlapped or not.
    """

    layer: int
    phase: str
    degree: int
    start_s: float
    end_s: float
    critical_s: dict[str, float]
    gradient_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def bound_by(self) -> str:
        return max(self.critical_s, key=lambda resource: self.critical_s[resource])


def critical_path(plan: Plan, timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans of the critical path in order of time, without gaps from start to end of the step.

    `timeline`: the result of `simulate` for this plan.
    """
    by_task = timeline.by_task()
    spans = [by_task[*task[:4], 0] for task in plan.sequence]
    if not spans:
        return ()
    place = max(range(len(spans)), key=lambda number: spans[number].end_s)
    path = [spans[place]]
    while plan.before[place]:
        place = max(plan.before[place], key=lambda number: (spans[number].end_s, number))
        path.append(spans[place])
    return tuple(reversed(path))


def layer_passes(plan: Plan, timeline: Timeline) -> list[LayerPass]:
    path = busy_intervals(critical_path(plan, timeline))
    reduces = [(span.start_s, span.end_s) for span in timeline.spans if span.kind == TaskKind.GRADIENT_ALL_REDUCE]
    own: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        if span.phase in PHASES and span.layer is not None and span.kind not in _KINDS_OUTSIDE_PASSES:
            own.setdefault((span.phase, span.layer), []).append(span)
    passes: list[LayerPass] = []
    start_s = 0.0
    for (phase, layer), spans in sorted(own.items(), key=lambda item: min(span.start_s for span in item[1])):
        end_s = max(span.end_s for span in spans)
        critical_s = {at: _total_overlap_s(path[at], start_s, end_s) for at in RESOURCES}
        degree = plan.degrees.get((phase, layer), 1)
        passes.append(
            LayerPass(layer, phase, degree, start_s, end_s, critical_s, _total_overlap_s(reduces, start_s, end_s))
        )
        start_s = end_s
    return passes


def busy_intervals(path: Iterable[Span]) -> dict[str, list[tuple[float, float]]]:
    """Return each resource's intervals along a path. Fused operations count as computation."""
    times: dict[str, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
    for span in path:
        times[resources_of(span.kind)[0]].append((span.start_s, span.end_s))
    return times


def _start_and_end_times(plan: Plan, costs: Costs) -> tuple[list[float], list[float]]:
    seconds, contention = costs.seconds(plan), costs.contention
    try:
        durations = [seconds[task] for task in plan.sequence]
    except KeyError as error:
        raise ConfigError(f"simulate: no duration for {task_name(error.args[0])}; add it to the costs") from None
    if not all(0 <= duration < math.inf for duration in durations):
        bad = next(task for task in plan.sequence if not 0 <= seconds[task] < math.inf)
        raise ConfigError(f"simulate: invalid duration {seconds[bad]} s of {task_name(bad)}")
    # Without contention, starts follow from dependencies alone.
    if plan.overlaps and contention.slows_any({RESOURCES[number] for number in plan.works}):
        return simulate_tasks(plan.before, *plan.graph, durations, speeds=contention.speeds, works=plan.works)
    return simulate_in_order(plan.before, durations)


def _total_overlap_s(times: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in times)


def simulate_in_order(before: Sequence[Iterable[int]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return starts and ends of topologically ordered tasks, without resource limits or contention."""
    starts: list[float] = []
    ends: list[float] = []
    for took, found in zip(seconds, before, strict=True):
        start = max([ends[one] for one in found], default=0.0)
        starts.append(start)
        ends.append(start + took)
    return starts, ends


def simulate_tasks(
    before: Sequence[Sequence[int]],
    followers: Sequence[Iterable[int]],
    on: Sequence[int],
    seconds: Sequence[float],
    priority: Sequence[float] | None = None,
    speeds: Sequence[Sequence[float]] | None = None,
    works: Sequence[int] | None = None,
) -> tuple[list[float], list[float]]:
    """Simulate all tasks without preemption. Return their starts and ends in seconds.

    When a resource is free, the ready task with the smallest priority starts; ties go to the smaller index.

    Args:
        before, followers: indices of the tasks that each task waits for, and of the tasks that wait for it.
        on: index of each task's resource in `RESOURCES`. Add `IDLE_ONLY` for a task that starts only if its resource
            would be idle otherwise: no other task can start at this time, also not after tasks that take no time.
        seconds: duration of each task without contention.
        priority: None: equal priorities.
        speeds: `cost.Contention.speeds`; None: no contention.
        works: index in `RESOURCES` of the hardware that each task uses, if links share a queue. None: as `on`, which
            then must not contain `IDLE_ONLY` tasks if `speeds` is given.
    """
    count = len(before)
    by_rank = rank = list(range(count))
    if priority is not None:
        by_rank, rank = sorted(by_rank, key=priority.__getitem__), [0] * count
        for number, place in enumerate(by_rank):
            rank[place] = number
    at = on if works is None else works
    waits = [len(found) for found in before]
    ready: list[list[int]] = [[] for _ in range(2 * _NUM_RESOURCES)]
    for number, place in enumerate(by_rank):
        if not waits[place]:
            ready[on[place]].append(number)  # sorted, hence a heap
    queues = list(enumerate(ready[:_NUM_RESOURCES]))
    spare = list(enumerate(ready[_NUM_RESOURCES:])) if max(on, default=0) >= IDLE_ONLY else []
    starts, ends = [0.0] * count, [0.0] * count
    end = [_NEVER_S] * _NUM_RESOURCES  # end of the running task of each resource
    running, known = [-1] * _NUM_RESOURCES, [-1] * _NUM_RESOURCES
    # For each running task: the work left at its last change of speed, and the time of this change. A task that never
    # slows down ends at exactly start + duration.
    left, since, speed = [0.0] * _NUM_RESOURCES, [0.0] * _NUM_RESOURCES, [1.0] * _NUM_RESOURCES
    now, never = 0.0, _NEVER_S
    while True:
        for resource, heap in queues:
            if heap and end[resource] == never:
                place = by_rank[heappop(heap)]
                running[resource], starts[place] = place, now
                end[resource] = now + seconds[place]
        if speeds is not None:
            busy = [resource for resource in range(_NUM_RESOURCES) if end[resource] < never]
            work = [at[place] for place in running]
            together = 0
            for resource in busy:
                together |= 1 << work[resource]
            for resource in busy:
                place, wanted = running[resource], speeds[together][work[resource]]
                if place != known[resource]:
                    known[resource], left[resource] = place, seconds[place]
                elif wanted != speed[resource]:
                    left[resource] = max(0.0, left[resource] - (now - since[resource]) * speed[resource])
                else:
                    continue
                since[resource], speed[resource] = now, wanted
                end[resource] = now + left[resource] / wanted
        soonest = min(end)
        if spare and soonest > now:
            for resource, heap in spare:
                if heap and end[resource] == never:
                    heappush(ready[resource], heappop(heap))
                    soonest = now
            if soonest == now:
                continue
        if soonest == never:
            return starts, ends
        now = soonest
        for resource, ends_at in enumerate(end):
            if ends_at == now:
                end[resource] = never
                place = running[resource]
                ends[place] = now
                for one in followers[place]:
                    waits[one] -= 1
                    if not waits[one]:
                        heappush(ready[on[one]], rank[one])
