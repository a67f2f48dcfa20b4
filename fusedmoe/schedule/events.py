"""Start and end of tasks by an event loop; topological order and dependents of tasks.

Tasks are indices, for fast list access. `before[n]` are the dependencies of task n, `followers[n]` its dependents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from fusedmoe.schedule.task import RESOURCES

_COUNT, _NEVER = len(RESOURCES), float("inf")

#: Added to a task's resource index: the task starts only if its resource would be idle.
IDLE_ONLY = _COUNT


def followers_of(before: Sequence[Iterable[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in before]
    for place, waited in enumerate(before):
        for one in waited:
            followers[one].append(place)
    return followers


def issue_order(before: Sequence[Sequence[int]], followers: Sequence[Iterable[int]]) -> list[int]:
    """Return all tasks, except those in or behind a cycle, in topological order.

    Tasks are sorted by their start with unit durations, then by index.
    """
    waits = list(map(len, before))
    ready = [place for place, count in enumerate(waits) if not count]
    order: list[int] = []
    while ready:
        order += ready
        next_ready = []
        for place in ready:
            for one in followers[place]:
                waits[one] -= 1
                if not waits[one]:
                    next_ready.append(one)
        ready = sorted(next_ready)
    return order


def run_in_order(before: Sequence[Iterable[int]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return starts and ends of topologically ordered tasks, without resource limits or contention."""
    starts: list[float] = []
    ends: list[float] = []
    for took, found in zip(seconds, before, strict=True):
        start = max([ends[one] for one in found], default=0.0)
        starts.append(start)
        ends.append(start + took)
    return starts, ends


def run(
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
    ready: list[list[int]] = [[] for _ in range(2 * _COUNT)]
    for number, place in enumerate(by_rank):
        if not waits[place]:
            ready[on[place]].append(number)  # sorted, hence a heap
    queues = list(enumerate(ready[:_COUNT]))
    spare = list(enumerate(ready[_COUNT:])) if max(on, default=0) >= IDLE_ONLY else []
    starts, ends = [0.0] * count, [0.0] * count
    end = [_NEVER] * _COUNT  # end of the running task of each resource
    running, known = [-1] * _COUNT, [-1] * _COUNT
    # For each running task: the work left at its last change of speed, and the time of this change. A task that never
    # slows down ends at exactly start + duration.
    left, since, speed = [0.0] * _COUNT, [0.0] * _COUNT, [1.0] * _COUNT
    now, never = 0.0, _NEVER
    while True:
        for resource, heap in queues:
            if heap and end[resource] == never:
                place = by_rank[heappop(heap)]
                running[resource], starts[place] = place, now
                end[resource] = now + seconds[place]
        if speeds is not None:
            busy = [resource for resource in range(_COUNT) if end[resource] < never]
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
