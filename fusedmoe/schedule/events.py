"""The event loop: when tasks start and end, an order to go through them in, and what waits for each.

Simulation, list scheduling, idle-slot filling, contention and the order in which a plan is issued are uses of what is
here. Tasks go by number: places in a list are quicker than keys. `before[n]` are the tasks that task n waits for,
`followers[n]` those that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from fusedmoe.schedule.task import RESOURCES

_COUNT, _NEVER = len(RESOURCES), float("inf")

#: Added to the number of a task's resource: it starts only where its resource would be idle.
SPARE = _COUNT


def followers_of(before: Sequence[Iterable[int]]) -> list[list[int]]:
    """Returns for each task the tasks that wait for it."""
    followers: list[list[int]] = [[] for _ in before]
    for place, waited in enumerate(before):
        for one in waited:
            followers[one].append(place)
    return followers


def issue_order(before: Sequence[Sequence[int]], followers: Sequence[Iterable[int]]) -> list[int]:
    """Returns all tasks, each after what it waits for: as they would start if each took the same time, and of those
    that start together the lower number first. Tasks that wait in a circle are left out, and all behind them."""
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
    """Returns starts and ends, as `run` does, of tasks that are numbered in an order like `issue_order`'s, where
    nothing but what is in `before` holds a task up."""
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
    """Returns starts and ends by the event loop: whenever a resource is free, the one of its ready tasks with the least
    priority starts, then the one with the lower number. A task that has started ends: nothing is interrupted.

    Args:
        on: the number of each task's resource in `RESOURCES`. With `SPARE` added the task starts only where nothing
            else can, now or as soon as what takes no time has ended.
        priority: None: all the same.
        speeds: of tasks while several resources work (`cost.Contention.speeds`); None: all go on as if alone.
        works: the number of the resource that each task keeps busy, where links share a queue; None: as `on`.
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
            ready[on[place]].append(number)  # in order, so a heap
    queues = list(enumerate(ready[:_COUNT]))
    spare = list(enumerate(ready[_COUNT:])) if max(on, default=0) >= SPARE else []
    starts, ends = [0.0] * count, [0.0] * count
    end = [_NEVER] * _COUNT  # of what runs on each
    running, known = [-1] * _COUNT, [-1] * _COUNT
    # Between two events nothing starts or ends, so all speeds are constant. Of what runs three numbers are kept: the
    # work that was left when its speed last changed, when that was, and its end if the speed stays. So a task that is
    # never slowed down ends at exactly start + duration.
    left, since, speed = [0.0] * _COUNT, [0.0] * _COUNT, [1.0] * _COUNT
    now, never = 0.0, _NEVER
    while True:
        # Every free resource takes its most urgent ready task.
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
                # What began since the last event has all of its work left; what was there before goes on at another
                # speed where something else began or ended.
                if place != known[resource]:
                    known[resource], left[resource] = place, seconds[place]
                elif wanted != speed[resource]:
                    left[resource] = max(0.0, left[resource] - (now - since[resource]) * speed[resource])
                else:
                    continue
                since[resource], speed[resource] = now, wanted
                end[resource] = now + left[resource] / wanted
        soonest = min(end)
        # Tasks that only fill idle time may start where nothing is ready and no event is due now.
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
        # All that ends at this moment frees its resource before anything starts.
        for resource, ends_at in enumerate(end):
            if ends_at == now:
                end[resource] = never
                place = running[resource]
                ends[place] = now
                for one in followers[place]:
                    waits[one] -= 1
                    if not waits[one]:
                        heappush(ready[on[one]], rank[one])
