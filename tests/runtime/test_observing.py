"""Measured steps end within their budget, and alternate."""

from __future__ import annotations

import pytest

from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.profiler import observe_steps
from fusedmoe.schedule.cost import MeasuredPart
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import LayerCosts, StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.timeline import Span, Timeline

COSTS = StepCosts((LayerCosts({phase: {} for phase in PHASES}, {phase: {} for phase in PHASES}),))
ONE, TWO = Plan.parse("compute: E0"), Plan.parse("compute: E0 E1")


@pytest.mark.parametrize(
    ("budget_s", "counted"),
    [
        (0.5, [(ONE, 0)]),
        (8.5, [(ONE, 0)]),
        (13.0, [(ONE, 0), (TWO, 0), (ONE, 1)]),
        (1e3, [(plan, number) for number in range(5) for plan in (ONE, TWO)]),
    ],
)
def test_observe_steps_respects_budget_and_alternates_plans(budget_s: float, counted: list[tuple[Plan, int]]) -> None:
    """Every step takes 3 s. The first step of each plan is not counted; the second of all steps always is."""
    now_s, done = [0.0], []

    def run(plan: Plan, number: int) -> Timeline:
        now_s[0] += 3.0
        first = plan not in [earlier for earlier, _ in done]
        done.append((plan, number))
        # The first step is slow; the median of the others counts.
        seconds = 50.0 if first else float(len(plan) + 10 * number)
        return Timeline(0, tuple(Span("expert", "expert", "compute", 0.0, seconds, *task[1:4]) for task in plan))

    found = observe_steps(Topology(), [ONE, TWO], COSTS, run, budget_s, lambda: now_s[0])
    order = [(ONE, 0), *counted]
    if (TWO, 0) in counted:
        order.insert(order.index((TWO, 0)), (TWO, 0))
    assert done == order
    rounds = {plan: [n for p, n in counted if p == plan] for plan in (ONE, TWO)}
    middle = {len(plan): len(plan) + 10 * sum(of) / len(of) for plan, of in rounds.items() if of}
    assert found.seconds == {MeasuredPart("expert", "forward", chunks): seconds for chunks, seconds in middle.items()}
