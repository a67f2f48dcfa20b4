"""Rows by collectives: all-to-alls between nodes, all-gathers and reduce-scatters of expert shards, both passes.

A batch crosses in one of two ways, which give the same numbers:

- One thing after the other, by operators (`autograd/exchange_operators.py`): permute → dispatch → experts → combine →
  unpermute. Autograd orders the backward, as often as it is asked to, and compilers and selective checkpoints see all.
- By a plan, in chunks that overlap (`engine/run.py`): `_ByPlan` below. The backward is written out, from what the
  forward stored: received rows and pre-activations of each chunk. A chunk has its share of every expert's rows
  (`engine/chunks.py`), so each row meets the same experts and is added up in the same order whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.autograd import exchange_operators
from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.exchange_operators import Crossing, Way
from fusedmoe.autograd.experts import no_wider
from fusedmoe.autograd.hooks import Hooks
from fusedmoe.autograd.order import permute, unpermute
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.chunks import Kept, RowChunks, concatenated
from fusedmoe.engine.dispatcher import Dispatcher, Handle, LocalExperts, Routed, selects, weight_of_rows
from fusedmoe.engine.run import Assigned, BackwardPass, Chunk, CopiesInTurns, ForwardPass, Pass, Run
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import gather_sum as kernels
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.task import COUNTS, Task, TaskKind

# (tokens, rows of the rank that sends the most, experts) -> the plans for these; None: nothing is to overlap.
FindPlans = Callable[[Tensor, int, LocalExperts], "Assigned | None"]


def no_plans(x_SM: Tensor, rows: int, experts: LocalExperts) -> None:
    """Finds no plan: nothing overlaps."""


class Met(NamedTuple):
    """A batch whose ranks have agreed on sizes: its rows without padding, their weights, and the exchange."""

    layout: Layout
    weight_N: Tensor | None
    exchange: Exchange


class _Sent(NamedTuple):
    """A dispatch, as `combine_by_operators` needs it: sizes, rows in all, and whose name operators know."""

    send_PE: Tensor
    come_QPE: Tensor
    rows: int
    way: Way | Crossing


@dataclass(eq=False)
class Collectives(Dispatcher):
    """Sends rows by all-to-alls over ep, and all-gathers and reduce-scatters over esp.

    Attributes:
        all_to_all: how rows cross ep.
        plans: finds the plans to work by.
        hooks: see rows on the wire, both ways.
        name: of who calls, for messages.
        streams: on which chunks overlap on CUDA; None: on one.
    """

    compiles = follows_plans = True

    topology: Topology
    all_to_all: AllToAll
    plans: FindPlans = no_plans
    hooks: Sequence[Hooks] = ()
    name: str = "MoELayer"
    recorder: Recorder | None = None
    streams: Streams | None = field(default_factory=Streams)

    def __post_init__(self) -> None:
        self.way = Way(self.topology, self.all_to_all)
        self._call = f"{self.name} {self.topology.number_layer()}"

    # Sizes first: the one host synchronisation of a layer.

    def meet(self, routed: Routed) -> Met:
        """Tells the ranks how many rows come. Collective."""
        layout = routed.layout.exact()  # padding does not travel
        weight_N = weight_of_rows(routed.weight_SK, layout)
        return Met(layout, weight_N, self.exchange(layout.counts_E, routed.x_SM.dtype, routed.refusal))

    def exchange(self, counts_E: Tensor, dtype: torch.dtype, refusal: str | None, **more: Any) -> Exchange:
        with span(self.recorder, "exchange of counts", kind=COUNTS, resource="inter", phase="forward"):
            return Exchange(self.all_to_all, self.topology.esp, counts_E, dtype, refusal, call=self._call, **more)

    # One thing after the other.

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return self._dispatch(routed.x_SM, self.meet(routed))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        layout, sent = handle.state
        check_rows("combine", "the experts' result", out_RM, handle.layout.tokens)
        rows_NM = self.combine_by_operators(out_RM, handle._replace(state=sent))
        with span(self.recorder, "unpermute", kind="unpermute", phase="forward"):
            return unpermute(rows_NM, layout)

    def _dispatch(self, x_SM: Tensor, met: Met) -> tuple[Tensor, Handle]:
        layout, weight_N, exchange = met
        crossing = Crossing(self.topology, exchange, self.hooks, self.recorder)
        with span(self.recorder, "permute", kind="permute", phase="forward"):
            rows_NM = permute(x_SM, layout)
        sizes = torch.from_numpy(exchange.send_PE), torch.from_numpy(exchange.come_QPE)
        rows_RM, handle = self._send(rows_NM, weight_N, sizes, crossing)
        return rows_RM, handle._replace(counts_RE=exchange.counts_RE, state=(layout, handle.state))

    def _send(
        self, rows_NM: Tensor, weight_N: Tensor | None, sizes: tuple[Tensor, Tensor], way: Way | Crossing
    ) -> tuple[Tensor, Handle]:
        result = exchange_operators.dispatch(rows_NM, weight_N, *sizes, way.name)
        rows_RM, weight_R, counts_E, offsets_E1, source_N, pair_N, row_SK = result
        received = Layout(counts_E, offsets_E1, source_N, pair_N, row_SK, verified=True)
        return rows_RM, Handle(
            received, None if weight_N is None else weight_R, state=_Sent(*sizes, rows_NM.shape[0], way)
        )

    def dispatch_by_operators(
        self, rows_NM: Tensor, weight_N: Tensor | None, layout: Layout, bad: Tensor | None = None
    ) -> tuple[Tensor, Handle]:
        """Takes [N, M] rows that the layout has sorted, with their weights, to their experts' ranks; a graph can hold
        all of it."""
        sizes = exchange_operators.meet(layout.counts_E, bad, rows_NM.dtype, self.way.name)
        return self._send(rows_NM, weight_N, sizes, self.way)

    def combine_by_operators(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """Returns [N, M], the results of the rows that were sent."""
        send_PE, come_QPE, rows, way = handle.state
        combined: Tensor = exchange_operators.combine(out_RM, send_PE, come_QPE, rows, way.name)
        return combined

    def by_operators(
        self, routed: Routed, experts: Callable[[Tensor, Layout, Tensor | None], Tensor], bad: Tensor | None = None
    ) -> Tensor:
        """Does all that a layer does between gate and shared expert by operators, sizes included, for graphs.

        Args:
            bad: how many router logits are not finite, a scalar; all ranks end where there are any.
        """
        layout, weight_N = routed.layout, weight_of_rows(routed.weight_SK, routed.layout)
        rows_RM, handle = self.dispatch_by_operators(permute(routed.x_SM, layout), weight_N, layout, bad)
        out_RM = experts(rows_RM, handle.layout, handle.weight_N)
        return unpermute(self.combine_by_operators(out_RM, handle), layout)

    def by_operators_without_tokens(
        self, routed: Routed, experts: nn.Module, bad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Does the same for a graph without tokens, and returns a zero to be added to the loss as well.

        A compiler leaves out what gives no number, also where other ranks wait for it; so a row of padding ties the
        exchange to the loss, and to a parameter.
        """
        x_0M = routed.x_SM
        like = next((one for one in experts.parameters() if one.requires_grad), x_0M.new_zeros(1))
        padding_1M = like.reshape(-1)[:1].to(x_0M.dtype).expand(1, x_0M.shape[1])
        weight_1 = None if routed.weight_SK is None else routed.weight_SK.new_zeros(1)
        rows_RM, handle = self.dispatch_by_operators(padding_1M, weight_1, routed.layout, bad)
        back_1M = self.combine_by_operators(experts(rows_RM, handle.layout, handle.weight_N), handle)
        return back_1M[:0], back_1M.sum()

    # By a plan, where there is one.

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        if selects() and routed.refusal is None and not self.hooks:
            # A selective checkpoint asks for operators, the exchange of sizes among them: none is to run twice.
            return self.by_operators(routed, experts)
        return self.cross(routed.x_SM, self.meet(routed), experts)

    def cross(self, x_SM: Tensor, met: Met, experts: LocalExperts, copies: CopiesInTurns | None = None) -> Tensor:
        """Does what `through_experts` does once the ranks have met. Collective.

        Args:
            copies: of experts, that travel in turns with rows; then there is a plan.
        """
        assigned = self.plans(x_SM, met.exchange.most_rows, experts)
        if assigned is None:
            rows_RM, handle = self._dispatch(*_with_backward(x_SM, met, experts))
            return self.combine(no_wider(experts(rows_RM, handle.layout, handle.weight_N), rows_RM), handle)
        (there, back), chunk_experts = assigned.plans.degrees, experts.in_chunks(x_SM)
        if there != back and not chunk_experts.any_degree:
            raise ConfigError(
                f"experts that are modules of their own need one degree for both passes, not {there} forward and "
                f"{back} backward: their backward follows the forward's chunks"
            )
        run = Run(
            assigned.plans,
            partial(self.topology.stop, self.name),
            self.hooks,
            self.recorder,
            None if self.streams is None else self.streams.on(x_SM.device),
            assigned.gradients,
            assigned.beside,
            copies,
        )
        batch = RowBatch(met.layout, met.exchange, chunk_experts, run)
        return _ByPlan.apply(x_SM, met.weight_N, batch, *chunk_experts.parameters)


def _with_backward(x_SM: Tensor, met: Met, experts: LocalExperts) -> tuple[Tensor, Met]:
    """Returns tokens and weights, of which one has a gradient if the experts learn.

    Tokens of other ranks may have one while those of this rank have none: all that train experts take part in the
    dispatch's backward, or the others would wait for them.
    """
    weight_N = met.weight_N
    if x_SM.requires_grad or (weight_N is not None and weight_N.requires_grad) or not torch.is_grad_enabled():
        return x_SM, met
    if not (isinstance(experts, nn.Module) and any(parameter.requires_grad for parameter in experts.parameters())):
        return x_SM, met
    if weight_N is None:
        return x_SM.detach().requires_grad_(), met
    return x_SM, met._replace(weight_N=weight_N.detach().requires_grad_())


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The rows of a call.

    Attributes:
        layout: of the rows that travel: tokens sorted by expert, without padding.
        exchange: made of that layout's counts.
        experts: the local ones.
    """

    layout: Layout
    exchange: Exchange
    experts: ChunkExperts
    run: Run

    @cached_property
    def forward_chunks(self) -> RowChunks:
        return RowChunks(self.exchange, self.layout, self.run.plans.degrees[0])

    @cached_property
    def backward_chunks(self) -> RowChunks:
        there, back = self.run.plans.degrees
        return self.forward_chunks if there == back else RowChunks(self.exchange, self.layout, back)


class _TokensPass(Pass):
    """A pass of rows that are all there from the beginning.

    Args:
        weights: of each chunk's sorted rows.
    """

    def __init__(self, batch: RowBatch, chunks: RowChunks, rows_NM: Tensor, weights: Sequence[Tensor | None]) -> None:
        run = batch.run
        plan = run.plans.forward if self.phase == "forward" else run.plans.backward
        # Tasks have the number of the layer in its model; a step's plan also has gradients of other layers.
        layer = next(task.layer for task in plan if task.kind == TaskKind.DISPATCH)
        super().__init__(run, {layer: batch.experts})
        self.layer = layer
        parts = zip(chunks.parts, chunks.received, weights, strict=True)
        self.own = {i: Chunk(part, layout, weight_R=weight_R) for i, (part, layout, weight_R) in enumerate(parts)}
        self.chunks[layer] = self.own
        self._rows: list[Tensor | None] = [*rows_NM.split([part.sent for part in chunks.parts])]
        # A stream must not get memory back for new tensors while another still reads it: all tensors that go from one
        # to another live until the streams have met again, at the end of `execute`.
        self._alive: list[Tensor] = []

    def start(self, task: Task) -> None:
        number = task.chunk or 0
        self.own[number].rows, self._rows[number] = self._rows[number], None

    def finish(self, task: Task, rows: Tensor) -> None:
        self._rows[task.chunk or 0] = rows

    def use(self, tensor: Tensor) -> Tensor:
        if self.settings.streams is not None:
            self._alive.append(tensor)
        return tensor

    def run(self) -> Tensor:
        """Runs the plan, and returns what came of the rows, in chunk order."""
        # Copies of experts, and gradients beside the last pass, have the link before this layer's rows.
        if self.settings.copies is not None:
            self.settings.copies.wait()
        if self.settings.gradients is not None:
            self.settings.gradients.wait()
        self.execute()
        rows = [chunk_rows for chunk_rows in self._rows if chunk_rows is not None]
        self._rows.clear()
        return concatenated(rows)


class _TokensForward(_TokensPass, ForwardPass):
    """Keeps what experts were given and what they keep."""


class _TokensBackward(_TokensPass, BackwardPass):
    """Goes back from what the forward pass has kept of its chunks, which may be others.

    Args:
        x, kept: of each chunk in the forward pass.
    """

    def __init__(
        self,
        batch: RowBatch,
        rows_NM: Tensor,
        weights: Sequence[Tensor | None],
        x: Sequence[Tensor],
        kept: Sequence[Any],
    ) -> None:
        there, here = batch.forward_chunks, batch.backward_chunks
        super().__init__(batch, here, rows_NM, weights)
        # Of each chunk here its rows among the forward's, as received and as sorted; None: the chunks are the same.
        self._places = None if here is there else here.rows_of(there)
        if self._places is None:
            for chunk, x_RM, chunk_kept in zip(self.own.values(), x, kept, strict=True):
                chunk.x_RM, chunk.kept = x_RM, chunk_kept
        else:
            self._x_RM, self._kept = Kept(x), Kept(kept)

    def recall(self, task: Task) -> None:
        if self._places is not None:
            number = task.chunk or 0
            chunk, (received, in_order) = self.own[number], self._places[number]
            chunk.x_RM, chunk.kept = self._x_RM.rows(received), self._kept.rows(in_order)


class _ByPlan(Function):
    """Σ over a token's rows of their weighted results, through the experts' ranks, by the plans of a run.

    Router weights cross in one message of their own before the first chunk, their gradients in one after the last.
    Saved for backward: received rows, R·M, and what the experts keep, the pre-activation R·H (gated 2·R·H); where the
    two plans differ in degree, the backward copies both once.
    """

    operation = "the way through the experts of several ranks (MoELayer, moe_layer)"

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_N: Tensor | None, batch: RowBatch, *parameters: Tensor | None) -> Tensor:
        chunks, exchange, experts = batch.forward_chunks, batch.exchange, batch.experts
        weights: list[Tensor | None] = [None] * len(chunks.parts)
        if weight_N is not None:
            weights = [*chunks.split(exchange.all_gather(exchange.dispatch(weight_N[:, None]))[:, 0])]
        forward = _TokensForward(batch, chunks, kernels.permute(x_SM, chunks.layout), weights)
        out_NM = forward.run()
        received, kept = zip(*((chunk.x_RM, chunk.kept) for chunk in forward.own.values()), strict=True)
        # What a chunk keeps is a tensor, or a graph of its own.
        tensors = kept if experts.any_degree else ()
        ctx.batch, ctx.kept = replace(batch, experts=experts.for_backward()), () if tensors else kept
        ctx.batch.__dict__["forward_chunks"] = chunks
        ctx.weighted = None if weight_N is None else weight_N.dtype
        ctx.save_for_backward(*received, *weights, *tensors, *parameters)
        return kernels.gather_sum(out_NM, chunks.layout)

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        batch: RowBatch = ctx.batch
        there, chunks, exchange = batch.forward_chunks, batch.backward_chunks, batch.exchange
        exchange.turn()
        count = len(there.parts)
        saved = ctx.saved_tensors
        received, weights, rest = saved[:count], saved[count : 2 * count], saved[2 * count :]
        kept, ctx.kept = (rest[:count] if batch.experts.any_degree else ctx.kept), None
        parameters = rest[count:] if batch.experts.any_degree else rest
        if chunks is not there:
            weights = (None,) * len(chunks.parts) if ctx.weighted is None else chunks.split(there.join(weights))
        rows_NM = kernels.permute(dy_SM.contiguous(), chunks.layout)
        backward = _TokensBackward(batch, rows_NM, weights, received, kept)
        del saved, received, kept, rest, rows_NM
        dx_SM = kernels.gather_sum(backward.run(), chunks.layout)
        dweight_N = None
        if ctx.weighted is not None:
            dweights = [
                chunk.weight_R.to(ctx.weighted) for chunk in backward.own.values() if chunk.weight_R is not None
            ]
            dweight_R1 = chunks.join(dweights)[:, None]
            dweight_N = exchange.combine(exchange.reduce_scatter(dweight_R1))[:, 0]
        totals, copies = backward.totals[backward.layer], batch.run.copies
        if copies is not None:
            copies.send_back(batch.experts.parameters, totals)
        if batch.run.gradients is not None:
            batch.run.gradients.begin(batch.run.beside, None if copies is None else copies.wait)
        pairs = zip(totals or (), parameters, strict=True)
        grads = (None if total is None or p is None else total.to(p.dtype) for total, p in pairs)
        return dx_SM, dweight_N, None, *grads
