"""The dispatcher of experts that are where a placement says: tokens go to the places of their copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.materialise import SendBack, send_totals
from fusedmoe.comm.exchange import Bad, Exchange
from fusedmoe.engine.chunk_experts import Totals
from fusedmoe.engine.collectives_dispatcher import Collectives, Met
from fusedmoe.engine.dispatcher import LocalExperts, Routed, recomputing
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.layers.expert_networks import Experts
from fusedmoe.runtime.recorder import span


class Moving(Collectives):
    """Sends tokens by collectives to copies of experts, which travel themselves.

    Worked example, two ranks, experts 0 and 1 owned by rank 0, expert 2 by rank 1, which also holds a copy of 0 in this
    step. Each rank has two places: 0 and 1 are rank 0's (experts 0, 1), 2 and 3 are rank 1's (experts 2, 0). Rank 1's
    tokens for expert 0 stay there: what is dispatched are tokens by place, as if there were four experts. Which copy a
    token's pair goes to also says which rank's sum it is in, so results are those of other placements to rounding.
    """

    compiles = False

    def __init__(self, placed: DynamicExperts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._placed = placed

    def meet(self, routed: Routed, by_node: bool = True) -> Met:
        placed = self._placed
        placed.come_in_turn(recomputing(), self.recorder)
        with span(self.recorder, "permute", kind="permute", phase="forward"):
            # Without padding: counts say how rows are split over copies. Only training steps count for predictions.
            layout = placed.split(routed.layout.exact(), placed.experts.training and not recomputing())
        refusal = placed.refusal() or routed.refusal
        return super().meet(routed._replace(layout=layout, refusal=refusal), by_node)

    def exchange(self, counts_E: Tensor, dtype: torch.dtype, refusal: str | Bad | None, **more: Any) -> Exchange:
        return super().exchange(counts_E, dtype, refusal, held=max(1, len(self._placed.held)), **more)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        met, placed = self.meet(routed), self._placed

        def use(own: Experts, send: SendBack | None) -> Tensor:
            copies = None
            # With a step's plan copies have the link between the rows of one layer and those of the next.
            if placed.travel == "in turns" and send is not None:
                copies = _InTurns(placed, send, list(own.parameters()))
            return self.cross(routed.x_SM, met, own, copies)

        return placed.call(use, recomputing())


class _InTurns:
    """The copies of a layer's experts in one forward, and the gradients of `tables` in its backward."""

    def __init__(self, placed: DynamicExperts, send: SendBack, tables: Sequence[Tensor]) -> None:
        self.wait = placed.wait
        self._send, self._tables = send, tables

    def send_back(self, made: Sequence[Tensor | None], totals: Totals) -> None:
        send_totals(self._send, self._tables, made, totals)
