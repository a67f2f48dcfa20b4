"""List scheduling, and idle-slot filling: plans for any tasks, by doing first what most hangs on.

    plan = list_plan(tasks, seconds)

Whenever a resource is free, the one of its ready tasks starts that has the longest way to the end, counting every task
on it; gradient all-reduces only where nothing else is ready (the pool of FlowMoE §3.3). A task that has started ends:
nothing is interrupted. What comes out is a plan like any other, in which these orders are fixed.

The schedule is then improved by going through it backwards and forwards again: from the end every task is put as late
as it can be, which tells which ones had time; from the start, those that had none go first (Li and Willis, "An
iterative scheduling technique for resource-constrained project scheduling", 1992). Gradient all-reduces are then tasks
like all others.

Where all orders are given but the gradients', `fill_idle_slots` puts these wherever the links between nodes would be
idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from fusedmoe.schedule.cost import ALONE, Contention, Line
from fusedmoe.schedule.events import SPARE, followers_of, issue_order, run
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import LINKS, RESOURCES, Task, TaskKind, standard_dependencies

_ROUNDS = 3


def list_plan(tasks: Iterable[Task], seconds: Mapping[Task, float]) -> Plan:
    """Returns the plan of the tasks, in the orders in which they start when each takes its `seconds`, without
    contention. Gradient all-reduces keep the order in which they are given."""
    return ListSchedule(tasks, seconds).plan()


class ListSchedule:
    """A list schedule before it is a plan: its makespan is known at a fraction of the cost.

    `hopeless_s`: a first schedule that takes so long is not improved.
    """

    def __init__(self, tasks: Iterable[Task], seconds: Mapping[Task, float], hopeless_s: float = math.inf) -> None:
        # Tasks go by number: places in a list are quicker than keys.
        self._tasks = list(tasks)
        self._seconds = [seconds[task] for task in self._tasks]
        on = {kind: RESOURCES.index(LINKS.get(kind, "compute")) for kind in {task.kind for task in self._tasks}}
        self._on = [on[task.kind] for task in self._tasks]
        number = {task: place for place, task in enumerate(self._tasks)}
        before = standard_dependencies(self._tasks)
        self._before = [[number[one] for one in before[task]] for task in self._tasks]
        # Buckets stay in back-propagation's order: each carries the bytes that follow the one before.
        buckets = [place for place, task in enumerate(self._tasks) if task.kind == TaskKind.GRADIENT_ALL_REDUCE]
        for earlier, bucket in pairwise(buckets):
            self._before[bucket].append(earlier)
        self._followers = followers_of(self._before)
        self._order = issue_order(self._before, self._followers)
        self._starts, self._end_s = self._improved(hopeless_s)

    def makespan_s(self, contention: Contention = ALONE) -> float:
        """Returns the `makespan` of the plan, with resources that disturb each other so much."""
        if not contention.disturbs([RESOURCES[number] for number in set(self._on)]):
            return self._end_s
        before, followers = ([list(waited) for waited in each] for each in (self._before, self._followers))
        # With the orders fixed, contention only makes tasks longer; it changes no order.
        for order in self._orders():
            for earlier, place in pairwise(order):
                before[place].append(earlier)
                followers[earlier].append(place)
        return max(run(before, followers, self._on, self._seconds, speeds=contention.speeds)[1])

    def plan(self) -> Plan:
        """Returns the plan of the orders in which the tasks start."""
        orders = ([self._tasks[place] for place in order] for order in self._orders())
        return Plan.from_orders(dict(zip(RESOURCES, orders, strict=True)))

    def _orders(self) -> list[list[int]]:
        """Returns the order of each resource."""
        # Tasks that start together took no time, all but the last: a task that waits for another one comes after it.
        depth = [0] * len(self._tasks)
        for place in self._order:
            depth[place] = 1 + max((depth[one] for one in self._before[place]), default=0)
        keys = list(zip(self._starts, (seconds > 0 for seconds in self._seconds), depth, strict=True))
        orders: list[list[int]] = [[] for _ in RESOURCES]
        for place in sorted(range(len(keys)), key=keys.__getitem__):
            orders[self._on[place]].append(place)
        return orders

    def _improved(self, hopeless_s: float) -> tuple[list[float], float]:
        """Returns the starts and the end of the best schedule that is found."""
        starts, end = self._schedule(self._urgency())
        # Backwards and forwards again, for as long as the end comes sooner.
        for _ in range(_ROUNDS if end < hopeless_s else 0):
            ends = [start + took for start, took in zip(starts, self._seconds, strict=True)]
            late, _ = self._schedule([-end_s for end_s in ends], True)
            # `late` counts from the end: what ends last there starts first here.
            again, sooner = self._schedule([-start - took for start, took in zip(late, self._seconds, strict=True)])
            if sooner >= end:
                break
            starts, end = again, sooner
        return starts, end

    def _urgency(self) -> list[float]:
        """Returns a number for each task, small where much hangs on it."""
        way = [0.0] * len(self._tasks)  # seconds from its start to the end of all that waits for it
        for place in reversed(self._order):
            # Plain comparisons: a search makes thousands of schedules, and `max` would build a list for each task.
            longest = 0.0
            for later in self._followers[place]:
                if way[later] > longest:
                    longest = way[later]
            way[place] = self._seconds[place] + longest
        # Gradients come after all else; of them one at most is ready at a time.
        return [
            math.inf if task.kind == TaskKind.GRADIENT_ALL_REDUCE else -seconds
            for task, seconds in zip(self._tasks, way, strict=True)
        ]

    def _schedule(self, priority: Sequence[float], backwards: bool = False) -> tuple[list[float], float]:
        """Returns starts of all tasks, and the end. Backwards, times count from the end."""
        before, followers = (self._followers, self._before) if backwards else (self._before, self._followers)
        starts, ends = run(before, followers, self._on, self._seconds, priority)
        return starts, max(ends, default=0.0)


def fill_idle_slots(
    orders: Mapping[str, Sequence[Task]], seconds: Mapping[Task, float], buckets: Iterable[Task], line: Line
) -> Plan:
    """Returns the plan of these orders, with gradient buckets wherever `inter` would be idle (Lina, FlowMoE's pool).

    What else is on `inter` goes first, but a bucket that has started ends (no pre-emption): it can hold up what gets
    ready meanwhile. Contention is not looked at.
    """
    bare, waiting = Plan.from_orders(orders), list(buckets)
    tasks = [*bare.sequence, *waiting]
    number = {task: place for place, task in enumerate(tasks)}
    gates = standard_dependencies(tasks)
    before: list[Sequence[int]] = list(bare.before)
    for bucket in waiting:
        # A bucket waits for the one before it, so that bytes go in back-propagation's order.
        ahead = [len(before) - 1] if bucket is not waiting[0] else []
        before.append([*(number[one] for one in gates[bucket]), *ahead])
    on = bare.graph[1] + [RESOURCES.index("inter") + SPARE] * len(waiting)
    took = [seconds[task] for task in bare.sequence] + [line.seconds(bucket.size or 0) for bucket in waiting]
    starts, _ = run(before, followers_of(before), on, took)
    # Of those that start together, what else is there first.
    inter = sorted((*orders["inter"], *waiting), key=lambda task: starts[number[task]])
    return Plan.from_orders({**orders, "inter": inter})
