"""One rank of a setting: profiles, runs every policy in turns, sweeps the degrees, runs the layer and the main job.

Started by `bench.cluster` inside a node, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 writes
`result.json` and pictures into the folder it is given.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.cluster import layer as layers
from bench.cluster.job import make_trainer
from bench.cluster.parts import computation
from bench.cluster.profile import Clock, Profile, Profiler
from bench.cluster.setting import LIMIT, SETTINGS, Setting
from bench.cluster.step import Step
from bench.cluster.sweep import cross, degrees_of, plan_of
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.timeline import RESOURCES
from fusedmoe.schedule.workload import StackCosts, Workload

_DRAWN = ("sequential", "pipemoe", "fsmoe", "joint")
_WAIT_S = 60.0


def main() -> None:
    name, rounds, seconds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    signal.alarm(seconds)  # whatever happens, this process ends
    setting = SETTINGS[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_WAIT_S))
    try:
        topology = Topology.from_sizes(
            ep=2,
            esp=setting.esp,
            mp=setting.esp,
            ranks_per_node=setting.ranks_per_node,
            timeout_s=_WAIT_S,
            duplex=True,
        )
        with topology.guard("the benchmark"):
            result = _measure(setting, topology, rounds, folder)
        if topology.rank == 0:
            (folder / "result.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def _measure(setting: Setting, topology: Topology, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    step = Step(setting, topology, computation(setting))
    _tell(topology, "profile")
    profiler = Profiler(setting, topology, step)
    costs = profiler.profile().stack
    plans = {policy: how.plan(costs, LIMIT) for policy, how in POLICIES.items()}
    topology.agree({policy: plan.fingerprint for policy, plan in plans.items()}, "the plans")
    _tell(topology, "policies")
    difference = _same_results(step, plans)
    runs = {policy: _runner(step, plan) for policy, plan in plans.items()}
    steps = _in_turns(topology, runs, rounds, profiler.round)
    _tell(topology, "sweep")
    chosen = degrees_of(plans["fsmoe"])
    swept = {pair: plan_of(costs, *pair) for pair in cross(chosen)}
    sweep = _in_turns(topology, {str(pair): _runner(step, plan) for pair, plan in swept.items()}, rounds)
    # Plans are made by what was measured before; what they should take is said by what was measured among them.
    profile = profiler.profile()
    costs = profile.stack
    _draw(setting, topology, step, plans, costs, folder)
    _tell(topology, "layer")
    layer = _layer_json(setting, topology, profile, rounds)
    job = None
    if setting.emulated_flops is None:
        _tell(topology, "main job")
        job = _job_json(setting, topology, profile, rounds)
    return {
        "setting": vars(setting) | {"ranks": setting.ranks, "computation": _words(setting)},
        "profile": profile.to_json(),
        "bound_s": bound_s(costs, LIMIT),
        "largest_difference_of_results": difference,
        "steps": {policy: _row(plans[policy], costs, of, steps["sequential"]) for policy, of in steps.items()},
        "sweep": _sweep_json(chosen, swept, sweep, costs),
        "layer": layer,
        "job": job,
    }


def _words(setting: Setting) -> str:
    if setting.emulated_flops is None:
        return "real, float32 on one thread a rank"
    return f"EMULATED: timed waits of the length that {setting.emulated_flops:.3g} FLOP/s take; communication is real"


def _runner(step: Step, plan: Plan) -> Callable[[], Any]:
    return lambda: step.run(plan)


def _in_turns(
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


def _same_results(step: Step, plans: Mapping[str, Plan]) -> float:
    """The largest difference of any policy's results from the sequential ones', as a share of the largest number."""
    right = step.run(plans["sequential"])
    worst = 0.0
    for plan in plans.values():
        for name, found in step.run(plan).items():
            scale = max(1e-30, float(right[name].abs().max()))
            worst = max(worst, float((found - right[name]).abs().max()) / scale)
    if not worst < 1e-4:
        raise AssertionError(f"policies' results differ by {worst:.2e}")
    return worst


def _row(plan: Plan, costs: StackCosts, seconds: list[float], sequential: list[float]) -> dict[str, Any]:
    predicted = simulate(plan, costs)
    median = statistics.median(seconds)
    busy = {resource: predicted.busy_s(resource) for resource in RESOURCES}
    return {
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "rounds_s": seconds,
        "predicted_s": predicted.end_s,
        "error": predicted.end_s / median - 1.0,
        "degrees": degrees_of(plan),
        "speed_up": statistics.median(sequential) / median,
        "resource_s": max(busy.values()),
        "resource": max(busy, key=lambda resource: busy[resource]),
        "plan": str(plan),
    }


def _sweep_json(
    chosen: tuple[int, int], plans: Mapping[tuple[int, int], Plan], seconds: dict[str, list[float]], costs: StackCosts
) -> dict[str, Any]:
    rows = []
    for pair, plan in plans.items():
        of = seconds[str(pair)]
        rows.append(
            {
                "degrees": pair,
                "median_s": statistics.median(of),
                "min_s": min(of),
                "max_s": max(of),
                "predicted_s": simulate(plan, costs).end_s,
            }
        )
    own = statistics.median(seconds[str(chosen)])
    best = min(rows, key=lambda row: row["median_s"])
    return {"chosen": chosen, "best": best["degrees"], "regret": own / best["median_s"] - 1.0, "rows": rows}


def _layer_json(setting: Setting, topology: Topology, profile: Profile, rounds: int) -> dict[str, Any]:
    made = {policy: layers.make_layer(setting, topology, policy, profile.model) for policy in ("off", *POLICIES)}
    x_SM = torch.randn(setting.S // 2, setting.M).requires_grad_()
    dy_SM = torch.randn(setting.S // 2, setting.M)
    runs = {policy: _layer_runner(layer, x_SM, dy_SM) for policy, layer in made.items()}
    seconds = _in_turns(topology, runs, rounds)
    off = statistics.median(seconds["off"])
    found = {}
    for policy, of in seconds.items():
        median = statistics.median(of)
        found[policy] = {"median_s": median, "min_s": min(of), "max_s": max(of), "speed_up": off / median}
        plans = list(made[policy]._plans.items())
        if plans:
            workload, both = plans[-1]
            assert isinstance(workload, Workload)
            costs = StackCosts((workload.layer_costs(profile.model),), contention=profile.model.contention)
            ends = [simulate(plan, costs).end_s for plan in (both.forward, both.backward)]
            degrees = [max(plan.degrees.values()) for plan in (both.forward, both.backward)]
            found[policy] |= {"predicted_s": sum(ends), "error": sum(ends) / median - 1.0, "degrees": degrees}
    return found


def _layer_runner(layer: Any, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> Callable[[], Any]:
    return lambda: layers.run(layer, x_SM, dy_SM)


def _job_json(setting: Setting, topology: Topology, profile: Profile, rounds: int) -> dict[str, Any]:
    """Without what the costs say nothing of, embeddings, head and optimizer, so nothing is predicted."""
    made = {policy: make_trainer(setting, topology, policy, profile.model) for policy in ("off", *POLICIES)}
    seconds = _in_turns(topology, {policy: partial(trainer.step, 0) for policy, (trainer, _) in made.items()}, rounds)
    off = statistics.median(seconds["off"])
    found = {}
    for policy, (_, plan) in made.items():
        of = seconds[policy]
        median = statistics.median(of)
        found[policy] = {"median_s": median, "min_s": min(of), "max_s": max(of), "speed_up": off / median}
        if plan is not None:
            found[policy] |= {"degrees": degrees_of(plan), "plan": str(plan)}
    return found


def _draw(
    setting: Setting, topology: Topology, step: Step, plans: Mapping[str, Plan], costs: StackCosts, folder: Path
) -> None:
    clock = Clock(topology)
    for policy in _DRAWN:
        recorder = Recorder(topology.rank)
        clock.seconds(_recorded(step, plans[policy], recorder))
        if topology.rank == 0:
            title = f"{policy}: predicted above, measured below ({setting.ranks} ranks, {setting.name})"
            draw([simulate(plans[policy], costs), recorder.timeline()], folder / f"{policy}.png", title=title)


def _recorded(step: Step, plan: Plan, recorder: Recorder) -> Callable[[], Any]:
    return lambda: step.run(plan, recorder)


def _tell(topology: Topology, what: str) -> None:
    if topology.rank == 0:
        print(f"  {time.strftime('%H:%M:%S')}  {what}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # Gloo's threads may keep a process that has nothing left to do
