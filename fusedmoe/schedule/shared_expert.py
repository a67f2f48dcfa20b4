"""Adds the shared expert to the plan of a layer's pass: compute tasks, which wait for no communication."""

from __future__ import annotations

from collections.abc import Callable

from fusedmoe.schedule.cost import TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.task import FUSED, Task, TaskKind

# Parts of the shared expert: several fill several gaps of computation, but each has a start-up time.
_PARTS = (1, 2, 4)


def with_shared_expert(
    plan: Plan, phase: str, costs: TaskDurations | None = None, part_s: Callable[[int], float] | None = None
) -> Plan:
    """Return the plan of one layer's pass with the shared expert, where the predicted pass is shortest.

    Plans that have such tasks are returned unchanged, and plans of fused operations, whose kernels already compute
    while they communicate.

    Args:
        costs: durations of the plan's tasks; None: one task precedes the first expert, while the first rows are in
            flight.
        part_s: returns the seconds of each of n equal parts of the shared expert.
    """
    if not plan.kinds.isdisjoint((*FUSED, TaskKind.SHARED_EXPERT)):
        return plan
    layer = next(task.layer for task in plan)
    if costs is None or part_s is None:
        return _with_task(plan, Task(TaskKind.SHARED_EXPERT, None, layer, phase), _first_expert(plan))
    best, best_s = plan, float("inf")
    for count in _PARTS:
        tasks = [Task(TaskKind.SHARED_EXPERT, None if count == 1 else i, layer, phase) for i in range(count)]
        known = TaskDurations({**costs.durations_s, **dict.fromkeys(tasks, part_s(count))}, costs.contention)
        candidate, start = plan, _first_expert(plan)
        for task in tasks:  # each where the pass is shortest, after the previous one
            places = range(start, len(candidate.compute) + 1)
            plans = {place: _with_task(candidate, task, place) for place in places}
            seconds = {place: makespan(each, known) for place, each in plans.items()}
            place = min(places, key=seconds.__getitem__)
            candidate, start = plans[place], place + 1
        if seconds[place] < best_s * (1 - ROUNDING):
            best, best_s = candidate, seconds[place]
    return best


def _first_expert(plan: Plan) -> int:
    # Tasks before the first expert precede the first sent rows.
    return next(place for place, task in enumerate(plan.compute) if task.kind == TaskKind.EXPERT)


def _with_task(plan: Plan, task: Task, place: int) -> Plan:
    return Plan((*plan.compute[:place], task, *plan.compute[place:]), plan.intra, plan.inter, plan.after)
