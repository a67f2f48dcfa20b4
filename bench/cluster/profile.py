"""Costs of a stack of the benchmark's layers: from the profiler and observed steps (`runtime.profiler`,
`schedule.refit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.cluster.setting import LIMIT, Setting
from bench.cluster.step import Step
from bench.cluster.turns import recorded_step
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.runtime.profiler import STEPS_BUDGET_S, observe_steps
from fusedmoe.schedule.cost import CostModel, Observed
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.refit import refit
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload

# Degrees that are measured.
_DEGREES = (1, 4)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class StackProfile:
    """Measured costs of a stack, the same on every rank.

    `model`, `points`, `seconds`: of the machine (`runtime.profiler.Profile`). `seen`: of steps. `stack`: combined.
    """

    model: CostModel
    points: Mapping[str, Points]
    seconds: float
    seen: Observed
    stack: StepCosts

    def to_json(self) -> dict[str, Any]:
        layer = self.stack.layers[0]
        return {
            "seconds": self.seconds,
            "lines": {name: vars(line) for name, line in self.model.lines.items()},
            "contention": asdict(self.model.contention),
            "chunks": {phase: {kind: vars(chunks) for kind, chunks in layer.chunks[phase].items()} for phase in PHASES},
            "dense_s": layer.dense_s,
            "micro": None if layer.micro is None else asdict(layer.micro),
            "gradient_bytes": layer.gradient_bytes,
            "points": self.points,
            "observed": self.seen.as_dict(),
        }


def profile_stack(setting: Setting, topology: Topology, step: Step) -> StackProfile:
    found, _ = cached_profile(topology, torch.device("cpu"))
    before = _stack(setting, step, found.costs)

    def run(plan: Plan, number: int) -> Timeline:
        return recorded_step(topology, partial(step.run, plan))

    seen = observe_steps(topology, _probes(before), before, run, STEPS_BUDGET_S)
    return StackProfile(found.costs, found.points, found.seconds, seen, refit(before, seen))


def _probes(costs: StepCosts) -> list[Plan]:
    degrees = [min(degree, LIMIT) for degree in _DEGREES]
    if costs.can_split:
        splits = [StepSplit(degree, degree, weights=weights) for degree in degrees for weights in (False, True)]
        return [micro_schedule(costs, split).plan() for split in splits]
    passes = ([ChunkedPass(three_queues, degree)] * len(costs.layers) for degree in degrees)
    return [step_plan(costs, of, of) for of in passes]


def _stack(setting: Setting, step: Step, model: CostModel) -> StepCosts:
    """Return a step's costs from the machine's alone: rows are distributed evenly over the experts."""
    esp = setting.esp
    layer = Workload(1, setting.S * esp, setting.M, setting.H, setting.E, k=1, ep=setting.ep, esp=esp)
    costs = layer.step_costs(model, [step.gradient_bytes] * setting.layers, layer.volumes(), whole=setting.blocks)
    alike = replace(costs.layers[0], rechunk_s=0.0)  # the layout needs no copies between passes
    return replace(costs, layers=(alike,) * setting.layers)
