"""Steps that are done to be measured: all ranks at once, plans in turns, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule.observed import Observed
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import observe
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import Timeline

#: For all steps that are done to be measured, in seconds.
BUDGET_S = 60.0
_ROUNDS = 3


def observe_steps(
    topology: Topology,
    plans: Sequence[Plan],
    costs: StepCosts,
    run: Callable[[Plan, int], Timeline],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """What the parts of steps by these plans take, the same on every rank. Collective over all ranks.

    Args:
        costs: of the steps, before.
        run: a step by a plan, in so many-th round, on this rank; its timeline begins with it. The first step of each
            plan is not counted: it takes memory that the system has to hand out first.
        budget_s: no step begins that would not end in so many seconds, but for the first two.
        clock: on this rank, in seconds.
    """
    steps: list[list[list[Timeline]]] = [[] for _ in plans]
    with WorkBar("measuring steps") as bar:
        run(plans[0], 0)
        began_s, taken_s, longest_s = clock(), 0.0, 0.0
        for number in range(_ROUNDS * len(plans)):
            which, round_ = number % len(plans), number // len(plans)
            in_turn = 2 if 0 < number < len(plans) else 1
            if taken_s + in_turn * longest_s > budget_s:
                break
            if in_turn == 2:
                run(plans[which], 0)
            timeline = run(plans[which], round_)
            ranks = all_gather_object(topology.world, (timeline, clock() - began_s), "measuring steps")
            steps[which].append([timeline for timeline, _ in ranks])
            before_s, taken_s = taken_s, max(seconds for _, seconds in ranks)
            longest_s = max(longest_s, (taken_s - before_s) / in_turn)
            if topology.is_first:
                bar.show(number + 1, _ROUNDS * len(plans))
    found = Observed()
    for plan, timelines in zip(plans, steps, strict=True):
        found |= observe(plan, costs, timelines)
    return found
