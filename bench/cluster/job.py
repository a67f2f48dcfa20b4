"""The training job `fusedmoe train` in a setting: step times under every schedule, "auto" and GPipe."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from bench.cluster import gpipe
from bench.cluster.model import explore, explored
from bench.cluster.setting import Setting
from bench.cluster.turns import beside, first_of, in_turns, planned, predicted, refitted, row, tell
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import StopRequest
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import uses_micro_batches
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.timeline import Timeline

#: Layers of the job's model.
LAYERS = 2
_SEQ_LEN, _K = 256, 2
# GPipe with p stages spends (p−1)/(m+p−1) of the time filling and draining.
_MICRO_BATCHES = (4, 8)


def job_settings(setting: Setting, policy: str) -> Settings:
    """Return the training job's settings under a schedule, with the rows of the layer benchmarks."""
    model = ModelConfig(
        layers=LAYERS,
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


def make_trainer(setting: Setting, topology: Topology, policy: str, costs: CostModel) -> Trainer:
    """Return the trainer under a schedule, planned as in `fusedmoe train` by the machine's `costs`. Collective."""
    settings = job_settings(setting, policy)
    trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**16), StopRequest())
    if policy != "off":
        trainer.set_plan(trainer.with_measured_times(costs), tell=partial(tell, topology))
    if policy == "flowmoe":
        trainer.tuning = None  # keep the predicted S_p: tuning it takes eighty steps
    return trainer


def measure(setting: Setting, topology: Topology, rounds: int, costs: CostModel | None = None) -> dict[str, Any]:
    """Measure all schedules. Collective. `costs`: of the machine; None: measured or cached."""
    costs = costs or cached_profile(topology, torch.device("cpu"))[0].costs
    made: dict[str, Trainer] = {}
    for policy in ("off", *POLICIES, "auto"):
        tell(topology, f"planning {policy}")
        made[policy] = make_trainer(setting, topology, policy, costs)
    tuning = made["auto"].tuning
    assert tuning is not None
    explore(topology, tuning, partial(made["auto"].step, 0))
    keys: dict[str, Hashable] = {"off": "off"}
    for policy, trainer in made.items():
        if policy != "off":
            assert trainer.planned is not None
            whole = (
                tuning.current_candidate.uses_micro_batches
                if policy == "auto"
                else uses_micro_batches(job_settings(setting, policy))
            )
            off = policy == "auto" and not len(tuning.plan)
            keys[policy] = "off" if off else (trainer.planned[0].fingerprint, whole)
    first = first_of(keys)
    runs: dict[str, Callable[[], Any]] = {name: partial(made[name].step, 0) for name in dict.fromkeys(first.values())}
    for count in _MICRO_BATCHES:
        if setting.S // _K // _SEQ_LEN * topology.size % count == 0:
            name = f"gpipe, {count} micro-batches"
            runs[name] = partial(
                gpipe.make_step(job_settings(setting, "off"), topology, random_corpus(2**16), count), 0
            )
            first[name] = name
    later = {}
    for name in runs:
        trainer = made.get(name)
        if trainer is not None and trainer.planned is not None:
            tell(topology, f"observing {name}")
            plan, step_costs = trainer.planned
            later[name] = refitted(topology, plan, step_costs, partial(_recorded, trainer))
    rows = {name: row(seconds) for name, seconds in in_turns(topology, runs, rounds).items()}
    for name, refit in later.items():
        found, of = rows[name], made[name].planned
        assert of is not None
        found |= predicted(found["median_s"], makespan(*of), of[0], refit) | planned(of[0])
    return {"rows": beside(rows, first), "auto": explored(tuning), "layers": LAYERS}


def _recorded(trainer: Trainer) -> Timeline:
    return trainer.recorded_step(0)[1]
