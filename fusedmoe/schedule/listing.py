"""List scheduling: plans for any tasks, by doing first what most hangs on.

    plan = list_plan(tasks, seconds)

Whenever a resource is free, the one of its ready tasks starts that has the longest way to the end, counting every task
on it; gradient all-reduces only where nothing else is ready (the pool of FlowMoE §3.3). A task that has started ends:
nothing is interrupted. What comes out is a plan like any other, in which these orders are fixed.

The schedule is then improved by going through it backwards and forwards again: from the end every task is put as late
as it can be, which tells which ones had time; from the start, those that had none go first (Li and Willis, "An
iterative scheduling technique for resource-constrained project scheduling", 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import LINKS, Task, standard_dependencies
from fusedmoe.schedule.timeline import RESOURCES

_GRADIENT = "gradient-all-reduce"
_ROUNDS = 3


def list_plan(tasks: Iterable[Task], seconds: Mapping[Task, float], resources: Mapping[str, str] = LINKS) -> Plan:
    """The plan of the tasks, in the orders in which they start when each takes its `seconds`.

    Gradient all-reduces keep the order in which they are given: they are pieces of one stream.

    Args:
        seconds: of each task. Contention is not looked at: where it counts, the plan is the same and takes longer.
        resources: the resource of each kind that is not "compute".
    """
    graph = _Graph(list(tasks), seconds, resources)
    starts, end = graph.schedule(graph.urgency())
    for _ in range(_ROUNDS):
        late, _ = graph.schedule([-(start + took) for start, took in zip(starts, graph.seconds, strict=True)], True)
        # `late` counts from the end: what ends last there starts first here.
        again, sooner = graph.schedule([-(start + took) for start, took in zip(late, graph.seconds, strict=True)])
        if sooner >= end:
            break
        starts, end = again, sooner
    return graph.plan(starts)


class _Graph:
    """Tasks by number: places in a list are quicker than keys."""

    def __init__(self, tasks: list[Task], seconds: Mapping[Task, float], resources: Mapping[str, str]) -> None:
        self._tasks = tasks
        self.seconds = [seconds[task] for task in tasks]
        self._on = [RESOURCES.index(resources.get(task.kind, "compute")) for task in tasks]
        number = {task: place for place, task in enumerate(tasks)}
        before = standard_dependencies(tasks)
        self._before = [[number[one] for one in before[task]] for task in tasks]
        pieces = [place for place, task in enumerate(tasks) if task.kind == _GRADIENT]
        for one, other in zip(pieces, pieces[1:], strict=False):
            self._before[other].append(one)
        self._followers: list[list[int]] = [[] for _ in tasks]
        for place, found in enumerate(self._before):
            for one in found:
                self._followers[one].append(place)
        self._order = self._topological()

    def _topological(self) -> list[int]:
        waits = [len(found) for found in self._before]
        order = [place for place, count in enumerate(waits) if not count]
        for place in order:  # grows meanwhile
            for one in self._followers[place]:
                waits[one] -= 1
                if not waits[one]:
                    order.append(one)
        return order

    def urgency(self) -> list[tuple[bool, float]]:
        """Small where much hangs on a task: the seconds from its start to the end of all that waits for it."""
        way = [0.0] * len(self._tasks)
        for place in reversed(self._order):
            longest = max((way[one] for one in self._followers[place]), default=0.0)
            way[place] = self.seconds[place] + longest
        return [(task.kind == _GRADIENT, -seconds) for task, seconds in zip(self._tasks, way, strict=True)]

    def schedule(self, priority: Sequence[object], backwards: bool = False) -> tuple[list[float], float]:
        """Starts of all tasks, and the end. Of ready tasks the one with the least priority goes first, then the first
        given. Backwards, tasks wait for what follows them, and times count from the end."""
        before, followers = (self._followers, self._before) if backwards else (self._before, self._followers)
        on, seconds = self._on, self.seconds
        ready: list[list[tuple[object, int]]] = [[] for _ in RESOURCES]
        waits = [len(found) for found in before]
        for place, count in enumerate(waits):
            if not count:
                heappush(ready[on[place]], (priority[place], place))
        busy = [False] * len(RESOURCES)
        starts = [0.0] * len(waits)
        running: list[tuple[float, int]] = []
        now = 0.0
        while True:
            for resource, heap in enumerate(ready):
                if heap and not busy[resource]:
                    place = heappop(heap)[1]
                    busy[resource], starts[place] = True, now
                    heappush(running, (now + seconds[place], place))
            if not running:
                return starts, now
            now = running[0][0]
            while running and running[0][0] == now:
                place = heappop(running)[1]
                busy[on[place]] = False
                for one in followers[place]:
                    waits[one] -= 1
                    if not waits[one]:
                        heappush(ready[on[one]], (priority[one], one))

    def plan(self, starts: Sequence[float]) -> Plan:
        """Of tasks that start together, one took no time: what waits for it comes after it."""
        depth = [0] * len(starts)
        orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
        for place in self._order:
            depth[place] = 1 + max((depth[one] for one in self._before[place]), default=0)
        for place in sorted(range(len(starts)), key=lambda place: (starts[place], depth[place])):
            orders[RESOURCES[self._on[place]]].append(self._tasks[place])
        return Plan.of(orders)
