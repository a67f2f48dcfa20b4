"""Price of `placement="fssdp"` where it can gain nothing: the main job at even loads, beside expert parallelism.

The same model, batches and random gate; a step is forward, backward, gradients over ranks and the optimizer, and with
the placement what it does in every step besides: loads are exchanged, placements found, copies made where they pay.
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
# Steps before the first that counts: loads for the first prediction and for t, and the owners that follow from it.
_WARM = WINDOW + 2
#: Turns for each round that was asked for: a price of some percent shows in the median of many steps.
_TURNS = 4


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """A step under both placements, by nothing in chunks and by FSMoE's plan. Collective.

    `price` of a row: the median over turns of its time over that of expert parallelism in the same turn, less one.
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
                trainer.set_plan(costs)  # by the lines of the machine: both placements have the same plan
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
