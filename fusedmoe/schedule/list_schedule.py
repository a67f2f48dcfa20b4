"""List scheduling by critical-path priority, and insertion of gradient all-reduces into idle slots.

When a resource is free, the ready task with the longest path to the end starts; gradient all-reduces start only if no
other task is ready (the pool of FlowMoE §3.3). There is no preemption.

Forward-backward passes then improve the schedule (Li and Willis, "An iterative scheduling technique for
resource-constrained project scheduling", 1992): a backward pass starts each task, including gradient all-reduces, as
late as possible, and a forward pass gives priority to tasks without slack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import IDLE_ONLY, run
from fusedmoe.schedule.task import (
    LINKS,
    RESOURCES,
    Task,
    TaskKind,
    followers_of,
    issue_order,
    standard_dependencies,
)

_NUM_IMPROVEMENTS = 3


def indexed_dependencies(tasks: Sequence[Task]) -> list[list[int]]:
    """Return the indices of each task's dependencies. Gradient all-reduces also keep their order."""
    number = {task: place for place, task in enumerate(tasks)}
    needed = standard_dependencies(tasks)
    before = [[number[one] for one in needed[task]] for task in tasks]
    # Each bucket holds the bytes after those of the previous one.
    for earlier, bucket in pairwise(task for task in tasks if task.kind == TaskKind.GRADIENT_ALL_REDUCE):
        before[number[bucket]].append(number[earlier])
    return before


def list_plan(tasks: Iterable[Task], seconds: Mapping[Task, float]) -> Plan:
    """Return the plan of the list schedule without contention."""
    return ListSchedule(tasks, seconds).plan()


class ListSchedule:
    """A list schedule of tasks. `makespan_s` is much cheaper than `plan`.

    `cutoff_s`: a first schedule that takes at least this long is not improved.
    """

    def __init__(self, tasks: Iterable[Task], seconds: Mapping[Task, float], cutoff_s: float = math.inf) -> None:
        self._tasks = list(tasks)
        self._seconds = [seconds[task] for task in self._tasks]
        on = {kind: RESOURCES.index(LINKS.get(kind, "compute")) for kind in {task.kind for task in self._tasks}}
        self._on = [on[task.kind] for task in self._tasks]
        self._before = indexed_dependencies(self._tasks)
        self._followers = followers_of(self._before)
        self._order = issue_order(self._before, self._followers)
        self._starts, self._end_s = self._best_schedule(cutoff_s)

    def makespan_s(self, contention: Contention = NO_CONTENTION) -> float:
        """Return the plan's seconds under contention, which lengthens tasks but changes no order."""
        if not contention.disturbs([RESOURCES[number] for number in set(self._on)]):
            return self._end_s
        before, followers = ([list(waited) for waited in each] for each in (self._before, self._followers))
        for order in self._orders():
            for earlier, place in pairwise(order):
                before[place].append(earlier)
                followers[earlier].append(place)
        return max(run(before, followers, self._on, self._seconds, speeds=contention.speeds)[1])

    def plan(self) -> Plan:
        orders = ([self._tasks[place] for place in order] for order in self._orders())
        return Plan.from_orders(dict(zip(RESOURCES, orders, strict=True)))

    def _orders(self) -> list[list[int]]:
        # Of tasks that start together, all but the last take no time. Dependents have a larger depth.
        depth = [0] * len(self._tasks)
        for place in self._order:
            depth[place] = 1 + max((depth[one] for one in self._before[place]), default=0)
        keys = list(zip(self._starts, (seconds > 0 for seconds in self._seconds), depth, strict=True))
        orders: list[list[int]] = [[] for _ in RESOURCES]
        for place in sorted(range(len(keys)), key=keys.__getitem__):
            orders[self._on[place]].append(place)
        return orders

    def _best_schedule(self, cutoff_s: float) -> tuple[list[float], float]:
        starts, end = self._schedule(self._priorities())
        for _ in range(_NUM_IMPROVEMENTS if end < cutoff_s else 0):
            ends = [start + took for start, took in zip(starts, self._seconds, strict=True)]
            late, _ = self._schedule([-end_s for end_s in ends], True)
            again, sooner = self._schedule([-start - took for start, took in zip(late, self._seconds, strict=True)])
            if sooner >= end:
                break
            starts, end = again, sooner
        return starts, end

    def _priorities(self) -> list[float]:
        path_s = [0.0] * len(self._tasks)  # seconds of the critical path from the task's start to the end
        for place in reversed(self._order):
            # Not `max`: it would build a list per task, and a search makes thousands of schedules.
            longest = 0.0
            for later in self._followers[place]:
                if path_s[later] > longest:
                    longest = path_s[later]
            path_s[place] = self._seconds[place] + longest
        # Gradients have the lowest priority; at most one is ready at a time.
        return [
            math.inf if task.kind == TaskKind.GRADIENT_ALL_REDUCE else -seconds
            for task, seconds in zip(self._tasks, path_s, strict=True)
        ]

    def _schedule(self, priority: Sequence[float], backwards: bool = False) -> tuple[list[float], float]:
        # Backwards, times count from the end.
        before, followers = (self._followers, self._before) if backwards else (self._before, self._followers)
        starts, ends = run(before, followers, self._on, self._seconds, priority)
        return starts, max(ends, default=0.0)


def fill_idle_slots(
    orders: Mapping[str, Sequence[Task]], seconds: Mapping[Task, float], buckets: Iterable[Task], line: Line
) -> Plan:
    """Insert gradient buckets into fixed orders wherever `inter` would be idle (Lina, FlowMoE's pool).

    A bucket is not preempted and may delay other tasks on `inter`. Ignores contention.
    """
    bare, waiting = Plan.from_orders(orders), list(buckets)
    tasks = [*bare.sequence, *waiting]
    number = {task: place for place, task in enumerate(tasks)}
    dependencies = standard_dependencies(tasks)
    before: list[Sequence[int]] = list(bare.before)
    for bucket in waiting:
        ahead = [len(before) - 1] if bucket is not waiting[0] else []
        before.append([*(number[one] for one in dependencies[bucket]), *ahead])
    on = bare.graph[1] + [RESOURCES.index("inter") + IDLE_ONLY] * len(waiting)
    took = [seconds[task] for task in bare.sequence] + [line.seconds(bucket.size or 0) for bucket in waiting]
    starts, _ = run(before, followers_of(before), on, took)
    # Among tasks that start together, buckets are last.
    inter = sorted((*orders["inter"], *waiting), key=lambda task: starts[number[task]])
    return Plan.from_orders({**orders, "inter": inter})
