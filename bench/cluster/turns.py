"""Runs in turns, on all ranks of a setting, what is said of each, and plans beside a policy's own choice of degrees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.cluster.profile import Clock
from bench.cluster.setting import LIMIT, Setting
from bench.cluster.step import Step
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.schedule.passes import PassOption, search, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import RESOURCES

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


def in_turns(
    topology: Topology,
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each, on the slowest rank, by round. Every round begins with another one, after `between`."""
    clock = Clock(topology)
    own: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(1 + rounds):  # the first is not counted
        between()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.manual_seed(1000 * number + topology.rank)
            taken = clock.seconds(runs[name])
            if number:
                own[name].append(taken)
    every = all_gather_object(topology.world, own)
    return {name: [max(of) for of in zip(*(rank[name] for rank in every), strict=True)] for name in names}


def same_results(step: Step, plans: Mapping[str, Plan]) -> float:
    """The largest difference of any policy's results from the sequential ones', as a share of the largest number."""
    right = {name: tensor.clone() for name, tensor in step.run(plans["sequential"]).items()}
    worst = 0.0
    for policy, plan in plans.items():
        for name, found in step.run(plan).items():
            scale = max(1e-30, float(right[name].abs().max()))
            differs = float((found - right[name]).abs().max()) / scale
            if not differs < 1e-4:  # nor if it is NaN
                raise AssertionError(f"results of {policy} differ from the sequential ones' by {differs:.2e} ({name})")
            worst = max(worst, differs)
    return worst


def row(plan: Plan, costs: StepCosts, seconds: list[float], sequential: list[float]) -> dict[str, Any]:
    """What a policy took in each round, beside what it should take."""
    predicted = simulate(plan, costs)
    busy = {resource: predicted.busy_s(resource) for resource in RESOURCES}
    return {
        **spread(seconds),
        "rounds_s": seconds,
        "predicted_s": predicted.end_s,
        "error": predicted.end_s / statistics.median(seconds) - 1.0,
        "degrees": degrees_of(plan),
        "speed_up": statistics.median(sequential) / statistics.median(seconds),
        "resource_s": max(busy.values()),
        "resource": max(busy, key=lambda resource: busy[resource]),
        "plan": str(plan),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def setting_json(setting: Setting) -> dict[str, Any]:
    """The setting, with what is computed in words."""
    words = "real, float32 on one thread a rank"
    if setting.emulated_flops is not None:
        words = f"EMULATED: timed waits of the length that {setting.emulated_flops:.3g} FLOP/s take; "
        words += "communication is real"
    return vars(setting) | {"ranks": setting.ranks, "computation": words}


def tell(topology: Topology, what: str) -> None:
    if topology.rank == 0:
        print(f"  {time.strftime('%H:%M:%S')}  {what}", flush=True)
