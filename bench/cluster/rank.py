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
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.cluster import balance, blocks, placed
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
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import LAYER_POLICIES, POLICIES
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload

_LAYERS, _SEQ_LEN, _K = 2, 256, 2

_DRAWN = ("sequential", "pipemoe", "fsmoe", "joint")
_WAIT_S = 60.0


def make_trainer(setting: Setting, topology: Topology, policy: str, costs: CostModel) -> tuple[Trainer, Plan | None]:
    """The trainer of the main job under a schedule, and the plan that it follows.

    As many rows leave a rank as in the setting's layers. It computes in earnest, so only where ranks compute.
    """
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
    settings = Settings(model=model, schedule=policy, ep=2, esp=setting.esp, mp=setting.esp)
    trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**16), StopRequest())
    return trainer, None if policy == "off" else trainer.set_plan(costs)[0]


def main() -> None:
    name, rounds, seconds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    signal.alarm(seconds)  # whatever happens, this process ends
    setting = setting_of(name, folder)
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
    made = {policy: layers.make_layer(setting, topology, policy, profile.model) for policy in ("off", *LAYER_POLICIES)}
    x_SM = torch.randn(setting.S // 2, setting.M).requires_grad_()
    dy_SM = torch.randn(setting.S // 2, setting.M)
    runs = {policy: partial(layers.run, layer, x_SM, dy_SM) for policy, layer in made.items()}
    seconds = in_turns(topology, runs, rounds)
    off = statistics.median(seconds["off"])
    found = {}
    for policy, of in seconds.items():
        median = statistics.median(of)
        found[policy] = {**spread(of), "speed_up": off / median}
        plans = list(made[policy]._planner.made.items())
        if plans:
            workload, both = plans[-1]
            assert isinstance(workload, Workload)
            costs = StepCosts((workload.layer_costs(profile.model),), contention=profile.model.contention)
            predicted_s = sum(makespan(plan, costs) for plan in (both.forward, both.backward))
            degrees = [max(plan.degrees.values()) for plan in (both.forward, both.backward)]
            found[policy] |= {"predicted_s": predicted_s, "error": predicted_s / median - 1.0, "degrees": degrees}
    return found


def _job_json(setting: Setting, topology: Topology, profile: Profile, rounds: int) -> dict[str, Any]:
    """Without what the costs say nothing of, embeddings, head and optimizer, so nothing is predicted."""
    made = {policy: make_trainer(setting, topology, policy, profile.model) for policy in ("off", *LAYER_POLICIES)}
    seconds = in_turns(topology, {policy: partial(trainer.step, 0) for policy, (trainer, _) in made.items()}, rounds)
    off = statistics.median(seconds["off"])
    found = {}
    for policy, (_, plan) in made.items():
        of = seconds[policy]
        median = statistics.median(of)
        found[policy] = {**spread(of), "speed_up": off / median}
        if plan is not None:
            found[policy] |= {"degrees": degrees_of(plan), "plan": str(plan)}
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
