"""Plans that are measured in loops of other libraries: a context around each step.

tuning = StepTuning(model)
for batch in batches:
    with tuning:
        …  # a whole step
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_of
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.step_costs import MAX_DEGREE
from fusedmoe.training.plan_tuning import PlanTuning
from fusedmoe.training.step_plan import AUTO, of_tokens


class StepTuning:
    """Has the layers of a model of Hugging Face, torchtitan or Megatron follow one plan after the other while it
    trains, and keeps to the fastest. Results do not depend on plans.

    The first step goes without a plan, and measures for them, once for a machine. Then steps tried cost 2% of 500
    steps at most, as `PlanTuning` has it; what was found is kept on disk for the next job. Steps that get longer or
    shorter begin it anew, and a step then measures again. The ranks that share the
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
        self._began_s, self._said, self._asked = 0.0, False, False

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
        given = self._model, first.topology, AUTO, of_tokens(costs, workload), workload
        self.tuning = PlanTuning(*given, limit=self._limit, drift=self._drift, measure=self._measured, tell=self._tell)

    def _measured(self, again_s: float) -> CostModel | None:
        """Returns what the step since the last call has measured; None: the next step is to measure."""
        plans = self._exchanges[0].plans
        # Between steps the modules' parameters need not be whole.
        plans.again_s, self._asked = None if self._asked else again_s, not self._asked
        if self._asked:
            return None
        assert plans.workload is not None and plans.costs is not None
        return of_tokens(plans.costs, plans.workload)
