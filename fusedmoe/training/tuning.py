"""FlowMoE's S_p tuned while a model trains: gradients in other pieces from step to step, the rest as it is."""

from __future__ import annotations

import torch

from fusedmoe.comm.collectives import all_reduce
from fusedmoe.engine.run import Plans
from fusedmoe.layers.pipeline import PipelinedBlocks
from fusedmoe.runtime.tune import PieceTuner
from fusedmoe.schedule.layer import half
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.whole import Split, micro_schedule
from fusedmoe.training.stream import GradientStream


class PieceTuning:
    """Has blocks follow a plan with one S_p after the other, and keeps to the best (FlowMoE §4.3).

        tuning = PieceTuning(blocks, stream, costs, plan)
        for batch in batches:
            seconds = step(batch)
            tuning.note(seconds)

    Args:
        blocks, stream: of the model.
        costs, plan: of its steps, the same on every rank; a plan of `micro_schedule`, such as FlowMoE's.
        samples: sizes that are tried.   steps: with each.
        drift: by which share steps must change for it to begin anew; None: never.
    Attributes:
        plan: that is followed now.   tuner: what was tried.
    Raises:
        ConfigError: without scikit-learn (`fusedmoe[plan]`), or numbers that are not positive.
    """

    def __init__(
        self,
        blocks: PipelinedBlocks,
        stream: GradientStream,
        costs: StackCosts,
        plan: Plan,
        *,
        samples: int = 8,
        steps: int = 10,
        drift: float | None = 0.1,
    ) -> None:
        self._blocks, self._stream, self._costs, self._split = blocks, stream, costs, Split.of(plan)
        self.tuner = PieceTuner(max(costs.gradient_bytes), samples, steps, drift)
        self.plan: Plan
        self._follow()

    def note(self, seconds: float) -> None:
        """What a step took on this rank; the slowest rank's counts. Collective over all ranks."""
        took = torch.tensor([seconds], dtype=torch.float64)
        all_reduce(self._blocks.topology.world, took, "max", "the longest step of all ranks")
        before = self.tuner.piece_bytes
        self.tuner.note(float(took))
        if self.tuner.piece_bytes != before:
            self._follow()

    def _follow(self) -> None:
        split = self._split._replace(piece_bytes=self.tuner.piece_bytes)
        self.plan = micro_schedule(self._costs, split).plan()
        self._blocks.follow(Plans(half(self.plan, "forward"), half(self.plan, "backward")), self._stream)
