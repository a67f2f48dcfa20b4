"""What `fusedmoe plan` says of copies of experts: how many may travel for a layer, and the step with them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from fusedmoe.cli.job import Sizes
from fusedmoe.cli.settings import Settings
from fusedmoe.layers.experts.base import Place
from fusedmoe.models.block import make_experts
from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.schedule.cost import CostModel, Costs
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.sparse import hidden_s, with_sparse
from fusedmoe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Copies:
    """Copies of experts in a planned step.

    Attributes:
        hidden_s: [L], for how long the link between nodes hides a sparse collective of each layer.
        expert_bytes: of one expert's parameters, as they travel.
        overlap: t, experts that travel for each layer: as many as the mean of `hidden_s` hides, or as asked for.
        seconds: of a sparse collective with so many.
        timeline: of the step in which every layer has them.
    """

    hidden_s: tuple[float, ...]
    expert_bytes: int
    overlap: int
    seconds: float
    timeline: Timeline

    @classmethod
    def of(
        cls, settings: Settings, sizes: Sizes, model: CostModel, plan: Plan, costs: Costs, timeline: Timeline
    ) -> Copies | None:
        """None but under Hecate's placement: no other has as many copies as links have time for.

        `timeline`: the plan's without copies.
        """
        if settings.placement != "fssdp" or sizes.ep == 1:
            return None
        again = settings.rematerialise
        layers = len({task.layer for task in plan if task.layer is not None})
        hidden_L = hidden_s(timeline, layers, again=again)
        expert_bytes, bytes_per_s = _expert_bytes(settings, sizes), model.line("all-to-all/ep").per_s
        assert settings.model.experts is not None
        found = min(settings.model.experts, overlap_degree(statistics.mean(hidden_L), expert_bytes, bytes_per_s))
        overlap = found if settings.placement_overlap is None else settings.placement_overlap
        seconds = overlap * expert_bytes / bytes_per_s
        copied = simulate(*with_sparse(plan, costs, [seconds] * layers, again=again))
        return cls(hidden_L, expert_bytes, overlap, seconds, copied)

    def as_dict(self) -> dict[str, Any]:
        return {
            "hidden_s": list(self.hidden_s),
            "expert_bytes": self.expert_bytes,
            "overlap": self.overlap,
            "seconds": self.seconds,
            "step_s": self.timeline.end_s,
        }

    def words(self, step_s: float) -> str:
        """`step_s`: of the step without copies."""
        longer = self.timeline.end_s / step_s - 1
        most = "not at all" if longer < 0.0005 else f"by {longer:.1%}"
        return (
            f"copies of experts: the links between nodes hide {1e3 * statistics.mean(self.hidden_s):.3g} ms a layer; "
            f"{self.overlap} experts of {self.expert_bytes / 2**20:.3g} MiB for each make the step longer {most}"
        )


def _expert_bytes(settings: Settings, sizes: Sizes) -> int:
    expert = make_experts(settings.model)
    expert.setup(settings.model.model_dim, Place(shards=sizes.esp), device="meta")
    return sum(p.numel() for p in expert.parameters()) * (8 if settings.dtype == "fp64" else 4)
