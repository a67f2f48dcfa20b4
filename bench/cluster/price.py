"""Overhead of `placement="fssdp"` when it cannot gain: the training job at even loads, compared with expert
parallelism.

Both use the same model, batches and random gate. A step is forward, backward, gradient reduction and optimizer; the
placement adds the exchange of loads, planning, and replicas if they pay off.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.cluster.job import job_settings
from bench.cluster.setting import Setting
from bench.cluster.turns import in_turns, row, tell
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import StopRequest
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.placement.hecate import WINDOW
from fusedmoe.runtime.cache import cached_profile

_POLICIES = ("off", "fsmoe")
# Warm-up steps: loads for the first prediction and for t, and the resulting owner changes.
_WARM = WINDOW + 2
#: Measurements per round: an overhead of a few percent needs the median of many steps.
_TURNS = 4


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time a step under both placements, without a schedule and with FSMoE's plan. Collective.

    `price` of a row: the median over rounds of its time divided by that of expert parallelism in the same round, minus
    one.
    """
    costs = cached_profile(topology, torch.device("cpu"))[0].costs
    made: dict[str, Trainer] = {}
    for policy in _POLICIES:
        for placement in ("ep", "fssdp"):
            name = f"{placement}, {policy}"
            tell(topology, f"{name}: {_WARM} steps")
            settings = job_settings(setting, policy)
            settings = replace(settings, placement=placement, model=replace(settings.model, gate="random"))
            trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**16), StopRequest())
            made[name] = trainer
            if policy != "off":
                trainer.set_plan(costs)  # machine costs: both placements get the same plan
            for _ in range(_WARM):
                trainer.step(0)
    tell(topology, "price")
    seconds = in_turns(topology, {name: partial(trainer.step, 0) for name, trainer in made.items()}, _TURNS * rounds)
    rows = {}
    for name, trainer in made.items():
        base = seconds[f"ep, {name.partition(', ')[2]}"]
        found = rows[name] = row(seconds[name])
        found["price"] = statistics.median(one / other for one, other in zip(seconds[name], base, strict=True)) - 1
        experts = trainer.sharded_experts
        if experts is not None:
            found |= {"overlap": experts.overlap, "copies": sum(str(one).count("+") for one in experts.placements)}
            trainer.close()
    return {"rows": rows, "layers": job_settings(setting, "off").model.layers}
