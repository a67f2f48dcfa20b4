"""The simulator: when each task of a plan starts and ends, given what each one costs.

    timeline = simulate(plan, costs)

Three resources, each one task at a time in the plan's order; a task starts as soon as the one before it on its
resource and all that it waits for have ended. While a task on `intra` and one on `inter` run at the same time, both go
on at the contention's share of their speed; computation is not slowed down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs, check_contention
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import Span, Timeline

#: Of seconds, relatively: times that differ by no more are equal. Sums in another order differ by less.
ROUNDING = 1e-9


def simulate(plan: Plan, costs: Costs, rank: int = 0) -> Timeline:
    """The predicted timeline of a plan; it starts at 0.

    Raises `ConfigError`, naming the task, for a task without a duration or with one that is negative or not finite.
    """
    starts, ends = _times(plan, costs.seconds(plan), costs.contention)
    resources = plan.resources
    spans = tuple(
        Span(task.kind, task.kind, resources[task], start, end, task.chunk, task.layer, task.phase)
        for task, start, end in zip(plan.sequence, starts, ends, strict=True)
    )
    return Timeline(rank, spans, "predicted")


def makespan(plan: Plan, costs: Costs) -> float:
    """The end of the last task, in seconds: the `end_s` of the simulated timeline, at less cost."""
    return max(_times(plan, costs.seconds(plan), costs.contention)[1], default=0.0)


def _times(plan: Plan, seconds: Mapping[Task, float], contention: float) -> tuple[list[float], list[float]]:
    """Starts and ends in the order of `plan.sequence`."""
    check_contention(contention)
    try:
        durations = [seconds[task] for task in plan.sequence]
    except KeyError as error:
        raise ConfigError(f"simulate: no duration for {name(error.args[0])}; add it to the costs") from None
    if not all(0 <= duration < math.inf for duration in durations):
        bad = next(task for task in plan.sequence if not 0 <= seconds[task] < math.inf)
        raise ConfigError(f"simulate: {name(bad)} cannot take {seconds[bad]} s")
    if contention < 1 and plan.intra and plan.inter:
        which, resources = {"compute": 0, "intra": 1, "inter": 2}, plan.resources
        return contended(plan.before, [which[resources[task]] for task in plan.sequence], durations, contention)
    starts: list[float] = []
    ends: list[float] = []
    for duration, before in zip(durations, plan.before, strict=True):
        start = max([ends[one] for one in before], default=0.0)
        starts.append(start)
        ends.append(start + duration)
    return starts, ends


def contended(
    before: Sequence[Sequence[int]], on: Sequence[int], durations: Sequence[float], contention: float
) -> tuple[list[float], list[float]]:
    """Starts and ends, event by event: between two events nothing starts or ends, so all speeds are constant.

    Of a running task three numbers are kept: the work that was left when its speed last changed, when that was, and
    its end if the speed stays. A task that is never slowed down ends at exactly start + duration.

    Args:
        before: of each task what it waits for, the one before it on its resource included.
        on: 0 for compute, 1 for intra, 2 for inter.
    """
    count = len(durations)
    followers: list[list[int]] = [[] for _ in range(count)]
    waits = [len(found) for found in before]
    for place, found in enumerate(before):
        for one in found:
            followers[one].append(place)
    starts, ends = [0.0] * count, [0.0] * count
    running = [-1, -1, -1]  # the place of each resource's task, or −1
    end = [math.inf] * 3
    left, since = [0.0] * 3, [0.0] * 3
    speed = 1.0  # of both links
    now = 0.0
    ready = [place for place in range(count) if not waits[place]]
    while True:
        for place in ready:
            resource = on[place]
            running[resource], starts[place] = place, now
            left[resource], since[resource] = durations[place], now
            end[resource] = now + (durations[place] if resource == 0 else durations[place] / speed)
        wanted = contention if running[1] >= 0 and running[2] >= 0 else 1.0
        if wanted != speed:
            for link in (1, 2):
                if running[link] >= 0:
                    left[link] = max(0.0, left[link] - (now - since[link]) * speed)
                    since[link], end[link] = now, now + left[link] / wanted
            speed = wanted
        resource = end.index(min(end))
        place = running[resource]
        if place < 0:
            return starts, ends
        now = ends[place] = end[resource]
        running[resource], end[resource] = -1, math.inf
        ready = []
        for one in followers[place]:
            waits[one] -= 1
            if not waits[one]:
                ready.append(one)
