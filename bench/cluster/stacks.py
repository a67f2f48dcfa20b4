"""A stack of the benchmark's layers (`step.py`) under every policy, and degrees around FSMoE's choice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.cluster.blocks import plans_by_policy
from bench.cluster.profile import StackProfile
from bench.cluster.setting import LIMIT, Setting
from bench.cluster.step import Step
from bench.cluster.turns import beside, degrees_of, first_of, in_turns, planned, predicted, row, spread
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.policies.fsmoe_plans import PassOption, search
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import RESOURCES

DEGREES = tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= LIMIT)


def measure_steps(
    setting: Setting, topology: Topology, step: Step, profile: StackProfile, rounds: int, folder: Path
) -> dict[str, Any]:
    """Time every policy, with its prediction and exposed communication. Collective.

    Exposed communication: seconds in which a link is busy while this rank computes nothing, in the recorded and the
    predicted timeline. Rank 0 plots both into `folder`.
    """
    costs = profile.stack
    policies = {policy: POLICIES[policy].plan(costs.by_layer(), LIMIT) for policy in layer_policies()}
    plans = plans_by_policy(costs, LIMIT) if setting.blocks else policies
    topology.require_equal_facts({policy: plan.fingerprint for policy, plan in plans.items()}, "the plans")
    difference = same_results(step, plans)
    first = first_of({policy: plan.fingerprint for policy, plan in plans.items()})
    recorders: dict[str, list[Recorder]] = {policy: [] for policy in first.values()}
    runs = {policy: partial(_recorded, step, plans[policy], topology.rank, of) for policy, of in recorders.items()}
    seconds = in_turns(topology, runs, rounds)
    own = {policy: [one.timeline() for one in of[1:]] for policy, of in recorders.items()}
    every = all_gather_object(topology.world, {policy: [one.exposed_s() for one in of] for policy, of in own.items()})
    rows = {}
    for policy, of in seconds.items():
        should = simulate(plans[policy], costs)
        busy = {resource: should.busy_s(resource) for resource in RESOURCES}
        exposed = [statistics.mean(of) for of in zip(*(rank[policy] for rank in every), strict=True)]
        rows[policy] = row(of) | predicted(statistics.median(of), should.end_s) | planned(plans[policy])
        rows[policy] |= {"resource": max(busy, key=lambda resource: busy[resource]), "resource_s": max(busy.values())}
        rows[policy] |= {"exposed_s": statistics.median(exposed), "predicted_exposed_s": should.exposed_s()}
        if topology.rank == 0:
            title = f"{policy}: predicted above, measured below ({setting.ranks} ranks, {setting.name})"
            draw([should, own[policy][-1]], folder / f"{policy.replace(', ', '-')}.png", title=title)
    return {
        "rows": beside(rows, first),
        "profile": profile.to_json(),
        "bound_s": bound_s(costs, LIMIT),
        "largest_difference_of_results": difference,
    }


def measure_sweep(topology: Topology, step: Step, costs: StepCosts, rounds: int) -> dict[str, Any]:
    """Time FSMoE's plan with all degrees that differ from its choice in one pass. Collective."""
    chosen = degrees_of(POLICIES["fsmoe"].plan(costs.by_layer(), LIMIT))
    plans = {pair: plan_of(costs, *pair) for pair in cross(chosen)}
    seconds = in_turns(topology, {str(pair): partial(step.run, plan) for pair, plan in plans.items()}, rounds)
    rows = [
        {"degrees": pair, **spread(seconds[str(pair)]), "predicted_s": makespan(plan, costs)}
        for pair, plan in plans.items()
    ]
    best = min(rows, key=lambda row: row["median_s"])
    regret = statistics.median(seconds[str(chosen)]) / best["median_s"] - 1.0
    return {"chosen": chosen, "best": best["degrees"], "regret": regret, "rows": rows}


def plan_of(costs: StepCosts, forward: int, backward: int) -> Plan:
    ways = [PassOption.from_stages(costs.layers[0].chunks["backward"], three_queues, backward, costs.contention)]
    count = len(costs.layers)
    return step_plan(
        costs,
        [ChunkedPass(three_queues, forward)] * count,
        [ChunkedPass(three_queues, backward)] * count,
        search(costs, [ways] * count),
    )


def cross(chosen: tuple[int, int]) -> list[tuple[int, int]]:
    forward, backward = chosen
    others = [(r, backward) for r in DEGREES] + [(forward, r) for r in DEGREES]
    return sorted({chosen, *others})


def same_results(step: Step, plans: Mapping[str, Plan]) -> float:
    """Return the largest difference of a policy's results from the sequential ones, relative to the largest value."""
    right = {name: tensor.clone() for name, tensor in step.run(plans["sequential"]).items()}
    worst = 0.0
    for policy, plan in plans.items():
        for name, found in step.run(plan).items():
            scale = max(1e-30, float(right[name].abs().max()))
            differs = float((found - right[name]).abs().max()) / scale
            if not differs < 1e-4:  # also fails for NaN
                raise AssertionError(f"results of {policy} differ from the sequential ones' by {differs:.2e} ({name})")
            worst = max(worst, differs)
    return worst


def _recorded(step: Step, plan: Plan, rank: int, kept: list[Recorder]) -> None:
    kept.append(Recorder(rank))
    step.run(plan, kept[-1])
