"""Gradients in pieces of one size, reduced whenever the links between nodes would be idle (Lina, FlowMoE's pool)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.step import Pass, step_plan
from fusedmoe.schedule.task import Task, standard_dependencies
from fusedmoe.schedule.timeline import RESOURCES

_GRADIENT = "gradient-all-reduce"


def fill_idle(costs: StackCosts, forward: Sequence[Pass], backward: Sequence[Pass], piece_bytes: int) -> Plan:
    """The plan of a step whose gradients go in pieces, each as soon as `inter` has nothing else to do.

    A piece never reaches over the end of a layer's gradient.
    """
    bare = step_plan(costs, forward, backward)
    orders = {resource: [task for task in bare.on(resource) if task.kind != _GRADIENT] for resource in RESOURCES}
    return fill(orders, costs.seconds(bare), gradient_pieces(costs.gradient_bytes, piece_bytes), costs.all_reduce)


def fill(
    orders: Mapping[str, Sequence[Task]], seconds: Mapping[Task, float], pieces: Iterable[Task], line: Line
) -> Plan:
    """The plan of these orders, with gradient pieces wherever `inter` would be idle.

    What else is on `inter` goes first, but a piece that has started ends (no pre-emption): it can hold up what gets
    ready meanwhile. Contention is not looked at: where it counts, the plan is the same and takes longer.
    """
    without = orders["inter"]
    clock = _Clock(Plan.of(orders), seconds)
    waiting = list(pieces)
    gates = standard_dependencies([*(task for resource in RESOURCES for task in orders[resource]), *waiting])
    inter: list[Task] = []
    free_s = 0.0
    for task in [*without, None]:
        ready_s = clock.ready_s(task) if task is not None else float("inf")
        while waiting:
            ends = [clock.ends.get(one) for one in gates[waiting[0]]]
            start_s = max([free_s, *(end for end in ends if end is not None)])
            if None in ends or start_s >= ready_s:
                break
            free_s = start_s + line.seconds(waiting[0].size or 0)
            inter.append(waiting.pop(0))
        if task is not None:
            free_s = max(free_s, ready_s) + seconds[task]
            clock.end(task, free_s)
            inter.append(task)
    return Plan.of({**orders, "inter": inter})


def gradient_pieces(gradient_bytes: Sequence[int], piece_bytes: int | None) -> list[Task]:
    """Of `piece_bytes` each, the last of a layer smaller (None: each layer's in one); in back-propagation's order."""
    return [
        Task(_GRADIENT, number, layer, "backward", min(piece_bytes or size, size - start))
        for layer, size in reversed(list(enumerate(gradient_bytes)))
        for number, start in enumerate(range(0, size, piece_bytes or size or 1))
    ]


class _Clock:
    """Ends of tasks, as far as those on `inter` have been given theirs."""

    def __init__(self, plan: Plan, seconds: Mapping[Task, float]) -> None:
        self.ends: dict[Task, float] = {}
        self._seconds = seconds
        self._inter = set(plan.inter)
        self._before = {task: list(before) for task, before in plan.dependencies.items()}
        for order in (plan.compute, plan.intra):
            for one, task in zip(order, order[1:], strict=False):
                self._before[task].append(one)
        self._followers: dict[Task, list[Task]] = {task: [] for task in self._before}
        for task, before in self._before.items():
            for one in before:
                self._followers[one].append(task)
        self._waits = {task: len(before) for task, before in self._before.items()}
        self._run([task for task, count in self._waits.items() if not count])

    def ready_s(self, task: Task) -> float:
        """When all that a task waits for has ended, apart from the tasks before it on `inter`."""
        return max((self.ends[one] for one in self._before[task]), default=0.0)

    def end(self, task: Task, at_s: float) -> None:
        """A task on `inter` ends: everything that this lets run does so."""
        self.ends[task] = at_s
        self._run(self._released(task))

    def _released(self, task: Task) -> list[Task]:
        found = []
        for one in self._followers[task]:
            self._waits[one] -= 1
            if not self._waits[one]:
                found.append(one)
        return found

    def _run(self, ready: list[Task]) -> None:
        while ready:
            task = ready.pop()
            if task not in self._inter:
                self.ends[task] = self.ready_s(task) + self._seconds[task]
                ready += self._released(task)
