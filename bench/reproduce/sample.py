"""Layers of FSMoE's grid in which schedules of whole models are simulated: the same ones for every table."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.simulate.grid import LAYERS, workloads
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload


def sampled(cases: int) -> Iterator[tuple[str, Workload]]:
    """So many of each testbed's layers, drawn once: fewer are the first of more."""
    for name, testbed in TESTBEDS.items():
        found = list(workloads(testbed))
        random.Random(0).shuffle(found)
        for work in found[:cases]:
            yield name, work


def costs_of(name: str, work: Workload) -> StepCosts:
    """A step of equal layers on that testbed, with its contention."""
    model = TESTBEDS[name].costs
    return StepCosts((work.layer_costs(model),) * LAYERS, model.line("all-reduce/dp"), model.contention)
