"""The dispatcher of experts that are where a placement says: tokens go to the places of their copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from fusedmoe.autograd.materialise import SendBack, send_totals
from fusedmoe.comm.all_to_all import LastTokens
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.metadata import ExpertCalls, NonFinite, RowForm
from fusedmoe.engine.chunk_experts import ChunkExperts, Totals
from fusedmoe.engine.collectives_dispatcher import Collectives, CountedBatch
from fusedmoe.engine.dispatcher import Handle, LocalExperts, Routed, recomputing
from fusedmoe.engine.recomputation import unselected
from fusedmoe.engine.run import Assigned, Run
from fusedmoe.experts.networks import Experts
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.layers.expert_tables import of_experts
from fusedmoe.runtime.recorder import active_recorder, span
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.sparse_collectives import add_sparse
from fusedmoe.schedule.task import TaskKind


class Moving(Collectives):
    """Sends tokens by collectives to copies of experts, which travel themselves.

    Worked example, two ranks, experts 0 and 1 owned by rank 0, expert 2 by rank 1, which also holds a copy of 0 in this
    step. Each rank has two places: 0 and 1 are rank 0's (experts 0, 1), 2 and 3 are rank 1's (experts 2, 0). Rank 1's
    tokens for expert 0 stay there: what is dispatched are tokens by place, as if there were four experts. Which copy a
    token's pair goes to also says which rank's sum it is in, so results are those of other placements to rounding.

    Copies travel beside what does not need them: predicted ones of the next layer while this one's experts compute,
    those chosen after the gate beside this layer's rows. Where they would be longer on their way than these, they are
    late: they follow the rows, while the experts that are here compute theirs. By a plan of several chunks, tokens for
    late copies are in the last ones, and the copies have a task of their own behind the dispatches.
    """

    compiles = False

    def __init__(self, placed: DynamicExperts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._placed = placed

    def exchange_metadata(
        self,
        routed: Routed,
        calls: ExpertCalls,
        by_node: bool = True,
        last: LastTokens | None = None,
        weight_N: Tensor | None = None,
    ) -> CountedBatch:
        placed = self._placed
        placed.come_in_turn(recomputing(), active_recorder())
        with span(active_recorder(), "permute", kind="permute", phase="forward"):
            # Without padding: counts say how rows are split over copies. Only training steps count for predictions.
            layout = placed.split(routed.layout.exact(), placed.experts.training and not recomputing())
        refusal = placed.refusal() or routed.refusal
        routed = routed._replace(layout=layout, refusal=refusal)
        return super().exchange_metadata(routed, calls, by_node, placed.late.tokens, weight_N)

    def exchange(self, counts_E: Tensor, form: RowForm, refusal: str | NonFinite | None, **options: Any) -> Exchange:
        return super().exchange(counts_E, form, refusal, held=max(1, len(self._placed.held)), **options)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        with unselected():
            return self._through_experts(routed)

    def _through_experts(self, routed: Routed) -> Tensor:
        counted, placed = self.exchange_metadata(routed, self.calls(self._placed.experts)), self._placed
        turns = placed.travel == "in turns"

        def use(own: Experts, send: SendBack | None) -> Tensor:
            copies = None
            # With a step's plan copies have the link between the rows of one layer and those of the next.
            if turns and send is not None:
                copies = _InTurns(placed, send, list(own.parameters()))
            y_SM = self.cross(counted, own, copies)
            placed.land()  # where none of this rank's rows have waited for them
            return y_SM

        return placed.call(use, recomputing(), arrived=turns and not placed.late.waiting)

    def compute(self, experts: LocalExperts, rows_RM: Tensor, handle: Handle, exchange: Exchange) -> Tensor:
        placed = self._placed
        follow, late_rows = placed.late.send(), self._late_rows
        placed.fetch_next()
        # Where hooks run, one call has all rows.
        begins = bool(placed.late) and not exchange.as_module and self._begins_without(rows_RM)
        if not (follow and begins):
            placed.land()
        if not (late_rows and begins):
            return super().compute(experts, rows_RM, handle, exchange)
        # The experts that are here begin, and what was copied after the gate travels meanwhile.
        layout, weight_N = handle.layout, handle.weight_N
        rows_E = exchange.sizes.come_QPE.sum(axis=(0, 1))
        late_E = np.isin(np.arange(len(rows_E)), late_rows)
        (here, here_n), (late, late_n) = (of_experts(layout, rows_E, chosen_E) for chosen_E in (~late_E, late_E))
        y_RM = experts(rows_RM, here, None if weight_N is None else weight_N[here_n])
        placed.land()
        return y_RM + experts(rows_RM, late, None if weight_N is None else weight_N[late_n])

    def in_chunks(self, experts: LocalExperts, x_SM: Tensor) -> ChunkExperts:
        if not self._begins_without(x_SM):
            self._placed.land()
        return super().in_chunks(experts, x_SM)

    def run(self, assigned: Assigned, exchange: Exchange, *given: Any) -> Run:
        plans, placed = assigned.plans, self._placed
        if placed.late.waiting:
            # Where tokens for them begin differs from rank to rank, and so does what waits; tasks and orders do not.
            late = _with_late(plans.forward, self._first_late(exchange, plans.degrees[0]))
            assigned = assigned._replace(plans=replace(plans, forward=late))
        return replace(super().run(assigned, exchange, *given), arrive=self._land)

    def _first_late(self, exchange: Exchange, degree: int) -> int:
        """Returns the first of so many chunks whose rows here need late copies; their number where none does."""
        if not exchange.sizes.come_QPE[..., self._late_rows].any():
            return degree
        return 0 if exchange.last is None else int(exchange.last.first(degree)[self._placed.group.index])

    def _land(self) -> None:
        self._placed.late.send(recorded=False)
        self._placed.fetch_next()
        self._placed.land()

    @property
    def _late_rows(self) -> list[int]:
        """Rows of this rank's table with late copies."""
        placed = self._placed
        return placed.late.rows_W[placed.group.index] if placed.late else []

    def _begins_without(self, x_SM: Tensor) -> bool:
        """Tells whether experts can compute rows like these while parameters of others have not arrived."""
        placed = self._placed
        # What is made of parameters, casts above all, is made of all of them at once.
        same = all(parameter.dtype == x_SM.dtype for parameter in placed.parameters)
        return placed.experts.each_alone and same and not placed.parametrised


@lru_cache(maxsize=256)
def _with_late(plan: Plan, first: int) -> Plan:
    """Returns a layer's forward plan with the task of late copies, which chunks need from the `first` on."""
    layer = next(task.layer for task in plan if task.kind == TaskKind.DISPATCH) or 0
    return add_sparse(plan, [layer], late={layer: first})


class _InTurns:
    """The copies of a layer's experts in one forward, and the gradients of `tables` in its backward."""

    def __init__(self, placed: DynamicExperts, send: SendBack, tables: Sequence[Tensor]) -> None:
        self.wait = placed.wait
        self._send, self._tables = send, tables

    def send_back(self, made: Sequence[Tensor | None], totals: Totals) -> None:
        send_totals(self._send, self._tables, made, totals)
