"""Plans beside a policy's own choice of degrees."""

from __future__ import annotations

from bench.cluster.setting import LIMIT
from fusedmoe.schedule.partition import PassOption, search
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts

DEGREES = tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= LIMIT)


def plan_of(costs: StepCosts, forward: int, backward: int) -> Plan:
    """FSMoE's plan with these degrees in all layers; gradients where they are best then."""
    ways = [PassOption.from_stages(costs.layers[0].chunks["backward"], three_queues, backward, costs.contention)]
    count = len(costs.layers)
    return step_plan(
        costs,
        [ChunkedPass(three_queues, forward)] * count,
        [ChunkedPass(three_queues, backward)] * count,
        search(costs, [ways] * count),
    )


def degrees_of(plan: Plan) -> tuple[int, int]:
    """The largest degree of each pass: with equal layers mostly that of all of them."""
    found = plan.degrees
    forward, backward = (max(r for (phase, _), r in found.items() if phase == of) for of in ("forward", "backward"))
    return forward, backward


def cross(chosen: tuple[int, int]) -> list[tuple[int, int]]:
    """The chosen degrees, and all that differ from them in one pass."""
    forward, backward = chosen
    others = [(r, backward) for r in DEGREES] + [(forward, r) for r in DEGREES]
    return sorted({chosen, *others})
