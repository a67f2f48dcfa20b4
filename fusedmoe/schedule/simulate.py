"""The simulator: when each task of a plan starts and ends, given what each one costs.

    timeline = simulate(plan, costs)

Three resources, each one task at a time in the plan's order; a task starts as soon as the one before it on its
resource and all that it waits for have ended. While a task on `intra` and one on `inter` run at the same time, both go
on at the contention's share of their speed; computation is not slowed down.

A fused operation starts as soon as it is the next one on both of its resources, and holds them until it ends. It does
all of a layer's road, over one kind of links: nothing is on the other kind that could disturb it.
"""

from __future__ import annotations

import math

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs, check_contention
from fusedmoe.schedule.events import run, run_in_order
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import resources_of
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import Span, Timeline

#: Of seconds, relatively: times that differ by no more are equal. Sums in another order differ by less.
ROUNDING = 1e-9


def simulate(plan: Plan, costs: Costs, rank: int = 0) -> Timeline:
    """The predicted timeline of a plan; it starts at 0. A task is where its kind works: an all-gather on the links
    inside a node, also where the plan has one queue for all links.

    Raises `ConfigError`, naming the task, for a task without a duration or with one that is negative or not finite.
    """
    starts, ends = _times(plan, costs)
    occupied = (resources_of(task.kind) for task in plan.sequence)
    spans = tuple(
        Span(kind, kind, on[0], start, end, chunk, layer, phase, on[1:])
        for (kind, chunk, layer, phase, _), on, start, end in zip(plan.sequence, occupied, starts, ends, strict=True)
    )
    return Timeline(rank, spans, "predicted")


def makespan(plan: Plan, costs: Costs) -> float:
    """The end of the last task, in seconds: the `end_s` of the simulated timeline, at less cost."""
    return max(_times(plan, costs)[1], default=0.0)


def _times(plan: Plan, costs: Costs) -> tuple[list[float], list[float]]:
    """Starts and ends in the order of `plan.sequence`."""
    seconds, contention = costs.seconds(plan), costs.contention
    check_contention(contention)
    try:
        durations = [seconds[task] for task in plan.sequence]
    except KeyError as error:
        raise ConfigError(f"simulate: no duration for {name(error.args[0])}; add it to the costs") from None
    if not all(0 <= duration < math.inf for duration in durations):
        bad = next(task for task in plan.sequence if not 0 <= seconds[task] < math.inf)
        raise ConfigError(f"simulate: {name(bad)} cannot take {seconds[bad]} s")
    if contention < 1 and plan.intra and plan.inter:
        return run(plan.before, *plan.graph, durations, contention=contention)
    return run_in_order(plan.before, durations)
