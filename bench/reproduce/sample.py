"""Sample of layers from FSMoE's grid, used by all tables that simulate schedules of whole models."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.simulate.grid import LAYERS, workloads
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload


def sampled(cases: int) -> Iterator[tuple[str, Workload]]:
    """Yield `cases` layers of each testbed, drawn once: a smaller sample is a prefix of a larger one."""
    for name, testbed in TESTBEDS.items():
        found = list(workloads(testbed))
        random.Random(0).shuffle(found)
        for work in found[:cases]:
            yield name, work


def costs_of(name: str, work: Workload) -> StepCosts:
    """Return the costs of a step of equal layers on that testbed, with its contention."""
    model = TESTBEDS[name].costs
    return StepCosts((work.layer_costs(model),) * LAYERS, model.line("all-reduce/dp"), model.contention)
