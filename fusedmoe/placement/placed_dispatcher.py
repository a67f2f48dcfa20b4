"""Dispatcher for dynamically placed experts: sends tokens to slots of owners and replicas."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.metadata import ExpertCalls, NonFinite, RowForm
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.collectives_dispatcher import Collectives, CountedBatch
from fusedmoe.engine.dispatcher import LocalExperts, Routed, is_recomputing
from fusedmoe.engine.recomputation import without_selective_checkpoint
from fusedmoe.placement.placed_experts import PlacedExperts
from fusedmoe.placement.replicas import ReplicaTiming
from fusedmoe.runtime.recorder import active_recorder, part_span


class PlacedDispatcher(Collectives):
    """Dispatches tokens by collectives to owners and replicas, while replica weights are in flight.

    A pair's slot (example in `expert_table`) also determines the rank that adds it to its partial sum, so results
    depend on the placement only by rounding. Predicted replicas of the next layer are sent while this layer's experts
    compute, on-demand replicas together with this layer's rows.
    """

    compiles = False

    def __init__(self, placed: PlacedExperts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._placed = placed

    def exchange_metadata(
        self, routed: Routed, calls: ExpertCalls, by_node: bool = True, weight_N: Tensor | None = None
    ) -> CountedBatch:
        placed = self._placed
        placed.begin_once(active_recorder())
        with part_span("permute"):
            # Without padding: rows are split by their counts. Predictions use training steps only.
            training = placed.table.experts.training and not is_recomputing()
            layout = placed.split_rows(routed.layout.exact(), training)
        refusal = placed.replicas.why_unusable() or routed.refusal
        return super().exchange_metadata(routed._replace(layout=layout, refusal=refusal), calls, by_node, weight_N)

    def exchange_counts(
        self, counts_E: Tensor, form: RowForm, refusal: str | NonFinite | None, **options: Any
    ) -> Exchange:
        return super().exchange_counts(counts_E, form, refusal, held=self._placed.table.num_rows, **options)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        with without_selective_checkpoint():
            counted = self.exchange_metadata(routed, self.find_expert_calls(self._placed.table.experts))
            return self._placed.call(partial(self.send_through_experts, counted, shared=routed.shared))

    def can_chunk(self, experts: ChunkExperts) -> bool:
        # In a step with a plan, all layers follow the plan.
        return self._placed.timing is ReplicaTiming.IN_TURNS or super().can_chunk(experts)

    def in_chunks(self, experts: LocalExperts, x_SM: Tensor) -> ChunkExperts:
        if self._placed.table.is_read_early(x_SM.dtype):
            self._placed.wait_for_replicas()
        return super().in_chunks(experts, x_SM)
