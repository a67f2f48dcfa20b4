"""Plans that are measured in loops of other libraries: a context around each step.

tuning = StepTuning(model)
for batch in batches:
    with tuning:
        …  # a whole step
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_of
from fusedmoe.schedule.step_costs import MAX_DEGREE
from fusedmoe.training.plan_tuning import PlanTuning
from fusedmoe.training.step_plan import AUTO


class StepTuning:
    """Has the layers of a model of Hugging Face, torchtitan or Megatron follow one plan after the other while it
    trains, and keeps to the fastest. Results do not depend on plans.

    The first step goes without a plan, and measures for them, once for a machine. Then steps tried cost 2% of 500
    steps at most, as `PlanTuning` has it; what was found is kept on disk for the next job. The ranks that share the
    experts choose together; where a job has several such groups, each chooses by its own seconds.

    Args:
        model: with `fusedmoe.hf`, `.titan.routed_experts` or `.megatron` in it; whatever schedules its layers have,
            they follow these plans. The same on every rank, as is the number of steps.
        limit: the most chunks.
        drift: by which share steps must get longer or shorter for all to begin anew; None: never.
        tell: is told on the first rank what was chosen, in a line, or that there is nothing to measure.
    Attributes:
        tuning: what chooses, after the first step; None: nothing travels, or graphs hold the exchanges.
    Raises:
        ConfigError: a model without such layers.
        RankError: from a step: ranks that come to different plans.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limit: int = MAX_DEGREE,
        drift: float | None = 0.1,
        tell: Callable[[str], None] = print,
    ) -> None:
        every = exchanges_of(model)
        if not every:
            raise ConfigError(
                "StepTuning: the model has no experts whose tokens fusedmoe.hf, fusedmoe.titan.routed_experts or "
                "fusedmoe.megatron sends. A model of MoELayers has fusedmoe.training.PlanTuning"
            )
        self._model, self._limit, self._drift, self._tell = model, limit, drift, tell
        self._exchanges = [exchange for exchange in every if exchange.topology.size > 1]
        for exchange in self._exchanges:
            exchange.set_plan(None)
            exchange.plans.tries = True
        self.tuning: PlanTuning | None = None
        self._began_s, self._said = 0.0, False

    def __enter__(self) -> StepTuning:
        self._began_s = self._now()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A step that failed says nothing, and other ranks may not come.
        if kind is not None or not self._exchanges:
            return
        if self.tuning is None:
            self._begin()
        else:
            self.tuning.note(self._now() - self._began_s)

    def _now(self) -> float:
        # Until a plan is chosen, seconds are those of the device; then the host need not wait any more.
        if torch.cuda.is_initialized() and not (self.tuning is not None and self.tuning.settled):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _begin(self) -> None:
        first = self._exchanges[0]
        workload, costs = first.plans.workload, first.plans.costs
        if workload is None or costs is None:  # perhaps the next step is another one
            if not self._said and first.topology.is_first:
                self._tell(
                    "schedule: a step had nothing to measure: compiled blocks and selective activation checkpoints go "
                    "one thing after the other, and plans have no effect there"
                )
            self._said = True
            return
        # As they are for so many tokens, however many rows of these there may be by the workload.
        seen = next(iter(costs.observed.values()), None)
        costs = replace(costs, observed={} if seen is None else {workload.shapes: replace(seen, rows=None)})
        given = self._model, first.topology, AUTO, costs, workload
        self.tuning = PlanTuning(*given, limit=self._limit, drift=self._drift, tell=self._tell)
