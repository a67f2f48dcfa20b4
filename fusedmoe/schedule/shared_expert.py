"""Adds the shared expert to the plan of a layer's pass: one compute task, which waits for no communication."""

from __future__ import annotations

from collections.abc import Callable

from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import FUSED, Task, TaskKind


def with_shared_expert(plan: Plan, phase: str, step_s: Callable[[Plan], float] | None = None) -> Plan:
    """Return the plan of one layer's pass with the shared expert, at the position with the shortest pass.

    Plans of fused operations are returned unchanged: their kernels already compute while they communicate.

    `step_s`: returns the predicted seconds of a plan with the task; None: the task precedes the first expert, while the
    first rows are in flight.
    """
    if not plan.kinds.isdisjoint(FUSED):
        return plan
    task = Task(TaskKind.SHARED_EXPERT, None, next(task.layer for task in plan), phase)
    compute = plan.compute
    # Tasks before the first expert precede the first sent rows.
    first = next(place for place, other in enumerate(compute) if other.kind == TaskKind.EXPERT)
    places = range(first, len(compute) + 1)
    plans = (Plan((*compute[:n], task, *compute[n:]), plan.intra, plan.inter, plan.after) for n in places)
    return next(plans) if step_s is None else min(plans, key=step_s)
