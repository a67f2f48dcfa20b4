"""The shared expert in the plan of a layer's pass: one task on the processor, which waits for no communication."""

from __future__ import annotations

from collections.abc import Callable

from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import FUSED, Task, TaskKind


def with_shared_expert(plan: Plan, phase: str, step_s: Callable[[Plan], float] | None = None) -> Plan:
    """Return the plan of one layer's pass with the shared expert, at the position with the shortest pass.

    Args:
        step_s: returns the predicted seconds of a plan with the task; None: the task comes first, while the first rows
            are in flight.
    Returns:
        A plan that is never slower than one with the task after the last expert. Plans of fused operations are
        returned as they are: kernels compute and communicate at once.
    """
    if not plan.kinds.isdisjoint(FUSED):
        return plan
    task = Task(TaskKind.SHARED_EXPERT, None, next(task.layer for task in plan), phase)
    compute = plan.compute
    # At the first expert or later: what precedes it is computed before the first rows are sent.
    first = next(place for place, other in enumerate(compute) if other.kind == TaskKind.EXPERT)
    places = range(first, len(compute) + 1)
    plans = (Plan((*compute[:n], task, *compute[n:]), plan.intra, plan.inter, plan.after) for n in places)
    return next(plans) if step_s is None else min(plans, key=step_s)
