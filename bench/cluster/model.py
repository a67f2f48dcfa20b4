"""Train a model of MoE layers, or of blocks in micro-batches, under every policy and `tune_step`; computation is a
timed wait.

Everything else is as in a job: `MoELayer`, `fusedmoe.pipeline`, gradient buckets, `PlannedStep`, and costs from the
profiler and from observed steps of this model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from bench.cluster.layer import Wait, make_layer
from bench.cluster.setting import Setting
from bench.cluster.step import START_S
from bench.cluster.turns import (
    beside,
    first_of,
    in_turns,
    planned,
    predicted,
    recorded_step,
    refitted,
    row,
    seconds_of,
    tell,
)
from fusedmoe.blocks.pipeline import Parts, PipelinedBlocks
from fusedmoe.cli.step_plans import measurement_plans
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.runtime.profiler import STEPS_BUDGET_S, observe_steps
from fusedmoe.runtime.recorder import Recorder, layer_recorder, record_operation, span
from fusedmoe.schedule.candidates import OFF_FAMILY, PlanCandidate
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.training import sync_gradients, tune_step
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.step_plan import PlannedStep

#: The cost of trying plans is stated relative to this number of steps.
STEPS = 500


class WaitingModel(nn.Module):
    """Layers of a dense part and experts, z = y + experts(y), y = dense(x).

    Attributes:
        blocks: the same layers as a pipeline, for settings with blocks; else None.   x: a batch.
    """

    def __init__(self, setting: Setting, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        # In step order: parameters before a layer's experts are its dense part.
        parts = [(WaitingDense(setting, n), make_layer(setting, topology, None)) for n in range(setting.layers)]
        self.parts = nn.ModuleList(nn.ModuleList(pair) for pair in parts)
        self.blocks: PipelinedBlocks | None = None
        tokens: tuple[int, ...] = (setting.S // 2,)
        if setting.blocks:
            self.blocks = fusedmoe.pipeline([Parts(*pair) for pair in parts])
            tokens = (_SAMPLES, setting.S // 2 // _SAMPLES)
        self.x = torch.randn(*tokens, setting.M)

    def forward(self, x: Tensor) -> Tensor:
        if self.blocks is not None:
            found: Tensor = self.blocks(x)
            return found
        for dense, layer in self.parts:  # type: ignore[misc]
            y, rows = dense(x)
            x = y + layer(rows)
        return x

    def step(self, buckets: GradientBuckets, recorder: Recorder | None = None) -> None:
        """Run both passes and reduce gradients over the ranks."""
        whole = self.blocks is not None and self.blocks.plans is not None
        for one in (one for pair in self.parts for one in pair):  # type: ignore[attr-defined]
            one.recorder = None if whole else recorder  # of micro-batches the tasks are spans, with all in them
        if self.blocks is not None:
            self.blocks.recorder = recorder
        z = self(self.x.detach().requires_grad_())
        loss = record_operation(recorder, lambda z: z.square().mean(), z, kind="loss")
        buckets.open(recorder)
        loss.backward()
        with span(recorder, "gradient sync", kind="gradient-all-reduce", resource="inter"):
            sync_gradients(self, self.topology, buckets=buckets)
        with span(recorder, "optimizer", kind="optimizer"):
            self.zero_grad(set_to_none=True)


# Samples per batch, if it is split into micro-batches.
_SAMPLES = 24


class WaitingDense(nn.Module):
    """Dense part with `gradient_bytes` of parameters that returns its rows after the time of attention."""

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__()
        assert setting.emulated_flops is not None
        self.weight = nn.Parameter(torch.zeros(setting.gradient_bytes // 4))
        self.recorder: Recorder | None = None
        self._row_s, self._number = setting.attention_flop / setting.emulated_flops / setting.S * 2, number

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = record_operation(layer_recorder(self.recorder, self._number), self._wait, x, kind="attention")
        return y, y

    def _wait(self, x: Tensor) -> Tensor:
        y: Tensor = Wait.apply(x, self.weight, START_S + x.numel() // x.shape[-1] * self._row_s)
        return y


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time a step under every policy, without a schedule ("off"), and under "auto" once it has chosen. Collective."""
    model = WaitingModel(setting, topology)
    costs = cached_profile(topology, torch.device("cpu"))[0].costs
    workload = make_layer(setting, topology, None).experts.workload(setting.S, 4, setting.ep, setting.esp)
    more: dict[str, Any] = {}
    if model.blocks is not None:
        workload, more = model.blocks.workload(model.x), {"blocks": model.blocks, "samples": _SAMPLES}
    probed = PlannedStep(model, topology, costs, workload, **more)

    def run(plan: Plan, number: int) -> Timeline:
        probed.follow(PlanCandidate("a probe", plan, setting.blocks, 0.0))
        return recorded_step(topology, partial(model.step, probed.buckets))

    tell(topology, "observing steps")
    seen = observe_steps(topology, measurement_plans(probed.costs, _SAMPLES), probed.costs, run, STEPS_BUDGET_S)
    costs = replace(costs, observed={workload.shapes: replace(seen, rows=workload.rows)})
    step = PlannedStep(model, topology, costs, workload, **more)
    tuning = tune_step(step, "auto", tell=partial(tell, topology))
    explore(topology, tuning, lambda: tuning.note(seconds_of(topology, lambda: model.step(step.buckets))))
    base = makespan(POLICIES["sequential"].plan(step.costs), step.costs)
    candidates = {OFF_FAMILY: PlanCandidate(OFF_FAMILY, Plan(), False, base)}
    candidates |= {name: step.candidate(name) for name in (POLICIES if setting.blocks else layer_policies())}
    candidates["auto"] = tuning.current_candidate
    first = first_of({name: (one.plan.fingerprint, one.uses_micro_batches) for name, one in candidates.items()})
    runs = {name: partial(model.step, step.buckets) for name in dict.fromkeys(first.values())}

    later = {}
    for name in runs:
        if name != OFF_FAMILY:
            one = candidates[name]
            step.follow(one)
            followed = partial(recorded_step, topology, partial(model.step, step.buckets))
            later[name] = refitted(topology, one.plan, step.costs_of(one.uses_micro_batches), followed)
    seconds = in_turns(topology, runs, rounds, lambda name: step.follow(candidates[name]))
    rows = {name: row(of) for name, of in seconds.items()}
    for name, refit in later.items():
        one, found = candidates[name], rows[name]
        found |= predicted(found["median_s"], one.predicted_s, one.plan, refit) | planned(one.plan)
    return {"rows": beside(rows, first), "auto": explored(tuning), "observed": seen.as_dict()}


def explore(topology: Topology, tuning: PlanChooser, step: Callable[[], object]) -> None:
    """Run steps until a plan is chosen; `step` reports its time to the tuning."""
    number = 0
    while not tuning.is_settled:
        if number % 10 == 0:
            tell(topology, f"auto tries plans: {number} steps so far, {len(tuning.trials.entries)} plans")
        step()
        number += 1


def explored(tuning: PlanChooser) -> dict[str, Any]:
    best, trials = tuning.best, tuning.trials
    tried = [one for one in trials.entries if one.step_times_s]
    return {
        "chosen": best.candidate.name,
        "steps_tried": trials.num_tried,
        "extra_s": trials.spent_s,
        "share_of_500_steps": trials.spent_s / (STEPS * best.median_s),
        "noise": trials.noise,
        "tried": [[one.candidate.name, one.median_s, len(one.step_times_s)] for one in tried],
    }
