"""One rank of a setting: profiles, runs every policy in turns, sweeps the degrees, runs the layer and the main job.

Started by `bench.cluster` inside a node, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 writes
`result.json` and pictures into the folder it is given, in which `balance` has left what it has found.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.cluster import balance, blocks, gpipe, placed
from bench.cluster import layer as layers
from bench.cluster.profile import Clock, Profile, Profiler
from bench.cluster.setting import LIMIT, SETTINGS, Setting
from bench.cluster.step import Step, computation
from bench.cluster.turns import cross, degrees_of, in_turns, plan_of, row, same_results, setting_json, spread, tell
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import StopRequest
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.measure import observe_layer
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import LAYER_POLICIES, POLICIES
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import PHASES
from fusedmoe.schedule.workload import Workload

_LAYERS, _SEQ_LEN, _K = 2, 256, 2
# Of GPipe: of p stages, (p−1)/(m+p−1) of the time is fill and drain.
_MICRO_BATCHES = (4, 8)

_DRAWN = ("sequential", "pipemoe", "fsmoe", "joint")
_WAIT_S = 60.0


def job_settings(setting: Setting, policy: str) -> Settings:
    """Of the main job under a schedule. As many rows leave a rank as in the layers; it computes in earnest."""
    model = ModelConfig(
        layers=_LAYERS,
        model_dim=setting.M,
        seq_len=_SEQ_LEN,
        batch=setting.S // _K // _SEQ_LEN,
        expert="ffn",
        hidden=setting.H,
        experts=setting.E,
        k=_K,
        capacity_factor=1.0,
    )
    return Settings(model=model, schedule=policy, ep=2, esp=setting.esp, mp=setting.esp)


def make_trainer(
    setting: Setting, topology: Topology, policy: str, costs: CostModel
) -> tuple[Trainer, tuple[Plan, StepCosts] | None]:
    """The trainer of the main job under a schedule, and the plan that it follows with what its steps cost."""
    settings = job_settings(setting, policy)
    trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**16), StopRequest())
    return trainer, None if policy == "off" else trainer.set_plan(trainer.measured(costs))


def main() -> None:
    name, rounds, seconds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    signal.alarm(seconds)  # whatever happens, this process ends
    setting = setting_of(name, folder)
    os.environ[CACHE] = str(folder / "cache")  # what the main job's steps take behind these links
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_WAIT_S))
    try:
        topology = Topology.from_sizes(
            ep=setting.ep,
            esp=setting.esp,
            mp=setting.esp,
            ranks_per_node=setting.ranks_per_node,
            timeout_s=_WAIT_S,
            duplex=True,
        )
        with topology.guard("the benchmark"):
            measured = placed.measure if setting.placed else blocks.measure if setting.blocks else _measure
            result = measured(setting, topology, rounds, folder)
        if topology.rank == 0:
            (folder / "result.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def setting_of(name: str, folder: Path) -> Setting:
    """With the rate of the link that was chosen by the machine, where it was."""
    setting = SETTINGS[name]
    if setting.inter_mbit is not None:
        return setting
    return replace(setting, **json.loads((folder / balance.FILE).read_text()))


def _measure(setting: Setting, topology: Topology, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    step = Step(setting, topology, computation(setting))
    tell(topology, "profile")
    profiler = Profiler(setting, topology, step)
    costs = profiler.profile().stack
    plans = {policy: POLICIES[policy].plan(costs.by_layer(), LIMIT) for policy in LAYER_POLICIES}
    topology.agree({policy: plan.fingerprint for policy, plan in plans.items()}, "the plans")
    tell(topology, "policies")
    difference = same_results(step, plans)
    runs = {policy: partial(step.run, plan) for policy, plan in plans.items()}
    steps = in_turns(topology, runs, rounds, profiler.round)
    tell(topology, "sweep")
    chosen = degrees_of(plans["fsmoe"])
    swept = {pair: plan_of(costs, *pair) for pair in cross(chosen)}
    sweep = in_turns(topology, {str(pair): partial(step.run, plan) for pair, plan in swept.items()}, rounds)
    # Plans are made by what was measured before; what they should take is said by what was measured among them.
    profile = profiler.profile()
    costs = profile.stack
    _draw(setting, topology, step, plans, costs, folder)
    tell(topology, "layer")
    layer = _layer_json(setting, topology, profile, rounds)
    job = None
    if setting.emulated_flops is None:
        tell(topology, "main job")
        job = _job_json(setting, topology, profile, rounds)
    return {
        "setting": setting_json(setting),
        "profile": profile.to_json(),
        "bound_s": bound_s(costs, LIMIT),
        "largest_difference_of_results": difference,
        "steps": {policy: row(plans[policy], costs, of, steps["sequential"]) for policy, of in steps.items()},
        "sweep": _sweep_json(chosen, swept, sweep, costs),
        "layer": layer,
        "job": job,
    }


def _sweep_json(
    chosen: tuple[int, int], plans: Mapping[tuple[int, int], Plan], seconds: dict[str, list[float]], costs: StepCosts
) -> dict[str, Any]:
    rows = []
    for pair, plan in plans.items():
        of = seconds[str(pair)]
        rows.append({"degrees": pair, **spread(of), "predicted_s": makespan(plan, costs)})
    own = statistics.median(seconds[str(chosen)])
    best = min(rows, key=lambda row: row["median_s"])
    return {"chosen": chosen, "best": best["degrees"], "regret": own / best["median_s"] - 1.0, "rows": rows}


def _layer_json(setting: Setting, topology: Topology, profile: Profile, rounds: int) -> dict[str, Any]:
    x_SM = torch.randn(setting.S // 2, setting.M).requires_grad_()
    dy_SM = torch.randn(setting.S // 2, setting.M)
    model, off = profile.model, layers.make_layer(setting, topology, "off", profile.model)
    workload = off.experts.workload(setting.S, 4, setting.ep, setting.esp)
    of_lines = workload.step_costs(model, [0], off.parts)
    seen = observe_layer(topology, off.gate, off.order, off.experts, x_SM.detach(), of_lines)
    model = replace(model, observed={workload.shapes: seen})
    made = {policy: layers.make_layer(setting, topology, policy, model) for policy in LAYER_POLICIES} | {"off": off}
    runs = {policy: partial(layers.run, layer, x_SM, dy_SM) for policy, layer in made.items()}
    seconds = in_turns(topology, runs, rounds)
    off_s = statistics.median(seconds["off"])
    found = {}
    for policy, of in seconds.items():
        median = statistics.median(of)
        found[policy] = {**spread(of), "speed_up": off_s / median}
        plans = list(made[policy]._planner.made.items())
        if plans:
            workload, both = plans[-1]
            assert isinstance(workload, Workload)
            costs = workload.step_costs(model, [0], off.parts)
            predicted_s = sum(makespan(plan, costs) for plan in (both.forward, both.backward))
            # No attention is in it, but what surrounds the pipeline is.
            predicted_s += sum(costs.layers[0].dense_s[phase].get("gate", 0.0) for phase in PHASES)
            degrees = [max(plan.degrees.values()) for plan in (both.forward, both.backward)]
            found[policy] |= {"predicted_s": predicted_s, "error": predicted_s / median - 1.0, "degrees": degrees}
    return found


def _job_json(setting: Setting, topology: Topology, profile: Profile, rounds: int) -> dict[str, Any]:
    """A step of the main job by each schedule, beside its prediction, and by GPipe with each rank a stage."""
    made = {policy: make_trainer(setting, topology, policy, profile.model) for policy in ("off", *LAYER_POLICIES)}
    runs: dict[str, Callable[[], Any]] = {policy: partial(trainer.step, 0) for policy, (trainer, _) in made.items()}
    for count in _MICRO_BATCHES:
        settings = job_settings(setting, "off")
        step = gpipe.make_step(settings, topology, random_corpus(2**16), count)
        runs[f"gpipe, {count} micro-batches"] = partial(step, 0)
    seconds = in_turns(topology, runs, rounds)
    off = statistics.median(seconds["off"])
    found = {}
    for policy, of in seconds.items():
        median = statistics.median(of)
        found[policy] = {**spread(of), "speed_up": off / median}
        planned = made[policy][1] if policy in made else None
        if planned is not None:
            predicted_s = makespan(*planned)
            found[policy] |= {"degrees": degrees_of(planned[0]), "plan": str(planned[0])}
            found[policy] |= {"predicted_s": predicted_s, "error": predicted_s / median - 1.0}
    return found


def _draw(
    setting: Setting, topology: Topology, step: Step, plans: Mapping[str, Plan], costs: StepCosts, folder: Path
) -> None:
    clock = Clock(topology)
    for policy in _DRAWN:
        recorder = Recorder(topology.rank)
        clock.seconds(partial(step.run, plans[policy], recorder))
        if topology.rank == 0:
            title = f"{policy}: predicted above, measured below ({setting.ranks} ranks, {setting.name})"
            draw([simulate(plans[policy], costs), recorder.timeline()], folder / f"{policy}.png", title=title)


if __name__ == "__main__":
    main()
    os._exit(0)  # Gloo's threads may keep a process that has nothing left to do
