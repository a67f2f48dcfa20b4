"""Tokens by collectives: all-to-alls between nodes, all-gathers and reduce-scatters of expert shards, both passes.

A token goes once to each rank that has experts for it, and one sum comes back (`kernels/deduplicate.py`). A batch
crosses in one of two ways, whose results agree to rounding:

- One thing after the other, by operators (`autograd/exchange_operators.py`): permute → dispatch → experts → combine →
  unpermute. Autograd orders the backward, as often as it is asked to, and compilers and selective checkpoints see all.
- By a plan, in chunks that overlap (`engine/run.py`): `_ByPlan` below. The backward is written out, from what the
  forward stored: received tokens and pre-activations of each chunk. A chunk has its share of the tokens for every rank
  (`engine/chunks.py`), with all that a rank does for a token, so the order of a token's sums is the same for every
  plan. Matrix products of other numbers of rows may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fusedmoe.autograd import exchange_operators
from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.exchange_operators import Crossing, Way
from fusedmoe.autograd.experts import no_wider
from fusedmoe.autograd.order import permute, take_pairs, unpermute
from fusedmoe.comm.all_to_all import AllToAll, LastTokens, TwoLevel
from fusedmoe.comm.exchange import Exchange, exchange_metadata
from fusedmoe.comm.metadata import ExpertCalls, NonFinite, RowForm, TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import retains_graph
from fusedmoe.engine.chunk_experts import ChunkExperts, gradients_of
from fusedmoe.engine.chunks import Kept, RowChunks, concatenated
from fusedmoe.engine.dispatcher import (
    Dispatcher,
    Handle,
    LocalExperts,
    Routed,
    packs,
    recomputing,
    selects,
    weight_of_rows,
)
from fusedmoe.engine.module_hooks import called_for, must_be_called, why_called
from fusedmoe.engine.recomputation import unselected
from fusedmoe.engine.run import Assigned, BackwardPass, Chunk, CopiesInTurns, ForwardPass, Pass, Run, reduced_behind
from fusedmoe.hooks import Hooks
from fusedmoe.kernels import gather_sum as kernels
from fusedmoe.kernels.deduplicate import Received, Sending, sending
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.recorder import active_recorder, span
from fusedmoe.schedule.task import COUNTS, Task, TaskKind

#: Those that there are, by number.
dispatchers: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_new_number = count()

# (tokens, exchange, maker of experts in chunks) -> the plans for these; None: nothing is to overlap. Without a maker,
# where experts are called as a module, only assigned plans.
FindPlans = Callable[[Tensor, Exchange, Callable[[], ChunkExperts] | None], "Assigned | None"]


def no_plans(x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None) -> None:
    """Finds no plan: nothing overlaps."""


class CountedBatch(NamedTuple):
    """A batch whose ranks have exchanged metadata.

    Attributes:
        x_SM, weight_N: its tokens, and the router weights of its rows, sorted by expert, without padding. They require
            gradients where those of any rank do: all ranks take part in the backward of the dispatch, or some wait.
        sent: the tokens that are sent.
    """

    x_SM: Tensor
    weight_N: Tensor | None
    sent: Sending
    exchange: Exchange


class _Sent(NamedTuple):
    """A dispatch, as combine needs it: layout of the tokens that were sent, sizes, and whose name operators know."""

    tokens: Layout
    send_PC: Tensor
    come_QPC: Tensor
    way: Way | Crossing


@dataclass(eq=False)
class Collectives(Dispatcher):
    """Sends tokens by all-to-alls over ep, and all-gathers and reduce-scatters over esp.

    A token goes once to each rank with experts for it, and one sum comes back. Where rows are no copies of tokens
    (`Layout.source_N` is None) each of them travels.

    Attributes:
        all_to_all: how tokens cross ep.
        choose: chooses another way for the first batch and all that follow, all ranks alike; None: that is settled.
        plans: finds the plans to work by.
        hooks: see tokens and sums on the wire, both ways.
        name: of the caller, for messages.
        local: experts by autograd, as operators find them, called with rows, layout and weights; those by kernels they
            are given.
        number: by which operators find it when a graph runs, a scalar on the host.
        streams: on which chunks overlap on CUDA; None: on one.
    """

    compiles = follows_plans = True

    topology: Topology
    all_to_all: AllToAll
    plans: FindPlans = no_plans
    hooks: Sequence[Hooks] = ()
    name: str = "MoELayer"
    streams: Streams | None = field(default_factory=Streams)
    local: nn.Module | None = None
    choose: Callable[[Tensor], AllToAll] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.way = Way(self.topology, self.all_to_all)
        self._why: str | None = None  # experts are called as a module
        # Exchanges compare it: a rank that skipped a layer is named, and not given the rows of another one.
        self._call = f"{self.name} {self.topology.number_layer()}"
        self._enlist()

    def _enlist(self) -> None:
        # A graph takes it as it takes parameters, so that one graph does for all layers.
        number = next(_new_number)
        self.number = torch.tensor(number, device="cpu")
        dispatchers[number] = self

    @property
    def collectives(self) -> Collectives:
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._enlist()  # a copy is no other layer

    def exchange_metadata(
        self,
        routed: Routed,
        calls: ExpertCalls,
        by_node: bool = True,
        last: LastTokens | None = None,
        weight_N: Tensor | None = None,
    ) -> CountedBatch:
        """Exchange the numbers of this batch's tokens and pairs between the ranks. Collective.

        `calls`: how this rank can call its experts. `by_node`: two-level algorithms may forward tokens inside nodes.
        `last`: tokens to send last, unless they do. `weight_N`: router weights of the layout's rows, in place of
        `routed.weight_SK`.
        """
        if self.choose is not None:
            self.all_to_all = self.choose(routed.x_SM)
            self.way, self.choose = Way(self.topology, self.all_to_all), None
        # Hooks may have rows travel in a form that cannot be summed on the way.
        levels = self.all_to_all if by_node and isinstance(self.all_to_all, TwoLevel) and not self.hooks else None
        layout, x_SM, weight_SK = routed.layout, routed.x_SM, routed.weight_SK
        last = last if levels is None else None
        sent = sending(layout, self.topology.ep.size, None if last is None else last.last_E(x_SM.device))
        tokens_W = None if sent.code_N is None else sent.tokens.counts_E
        hop = None if levels is None or tokens_W is None else sending(sent.tokens, levels.nodes)
        sent = sent if hop is None else sent._replace(tokens=hop.tokens)
        weights = weight_N if weight_SK is None else weight_SK
        form = RowForm(x_SM.dtype, x_SM.shape[1], layout.row_SK.shape[1], None if weights is None else weights.dtype)
        grad = torch.is_grad_enabled()
        exchange = self.exchange(
            layout.counts_E,
            form,
            routed.refusal,
            tokens=None if tokens_W is None else TokenCounts(tokens_W, hop),
            expert_calls=calls,
            tokens_require_grad=grad and x_SM.requires_grad,
            weights_require_grad=grad and weight_SK is not None and weight_SK.requires_grad,
        )
        # Padding does not travel; how much of it there is the host knows now.
        exchange.last, pairs = last, exchange.pairs.sent
        self.travelled = pairs, exchange.sent
        weight_N = weight_N if weight_SK is None else take_pairs(weight_SK, layout.cut(pairs))
        if torch.is_grad_enabled():
            if exchange.tokens_require_grad and not x_SM.requires_grad:
                x_SM = x_SM.detach().requires_grad_()
            if exchange.weights_require_grad and weight_N is not None and not weight_N.requires_grad:
                weight_N = weight_N.detach().requires_grad_()
        return CountedBatch(x_SM, weight_N, sent.exact(exchange.sent, pairs), exchange)

    def exchange(self, counts_E: Tensor, form: RowForm, refusal: str | NonFinite | None, **options: Any) -> Exchange:
        """Call `exchange_metadata` over this dispatcher's ranks, with its arguments from `counts_E` on. Collective."""
        reason = nullcontext() if self._why is None else called_for(self._why)
        with reason, span(active_recorder(), "exchange of counts", kind=COUNTS, resource="inter", phase="forward"):
            ranks = self.all_to_all, self.topology.esp
            return exchange_metadata(*ranks, counts_E, form, refusal, call=self._call, **options)

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return self._dispatch(self.exchange_metadata(routed, ExpertCalls.MODULE))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        check_rows("combine", "the experts' result", out_RM, len(handle.layout.row_SK))
        return self.combine_by_operators(out_RM, handle)

    def _dispatch(self, counted: CountedBatch) -> tuple[Tensor, Handle]:
        x_SM, weight_N, sent, exchange = counted
        crossing = Crossing(self.topology, exchange, self.hooks, active_recorder())
        with span(crossing.recorder, "permute", kind="permute", phase="forward"):
            x_TM = permute(x_SM, sent.tokens)
        # Operators take tensors and plain values; these are on the host, where the collectives want them.
        sizes = torch.from_numpy(exchange.sizes.send_PC), torch.from_numpy(exchange.sizes.come_QPC)
        x_RM, handle = self.send_by_operators(x_TM, weight_N, sent, sizes, crossing)
        return x_RM, handle._replace(counts_RE=exchange.counts_RE)

    def send_by_operators(
        self, x_TM: Tensor, weight_N: Tensor | None, sent: Sending, sizes: tuple[Tensor, Tensor], way: Way | Crossing
    ) -> tuple[Tensor, Handle]:
        """Sends [T, M] tokens in these sizes, with the weights of the layout's rows."""
        result = exchange_operators.dispatch(x_TM, weight_N, sent.row_N, sent.code_N, sent.k, *sizes, way.name)
        x_RM, weight_R, _, *layout = result
        state = _Sent(sent.tokens, *sizes, way)
        return x_RM, Handle(Layout.of(layout), None if weight_N is None else weight_R, state=state)

    def dispatch_by_operators(
        self, x_SM: Tensor, weight_N: Tensor | None, layout: Layout, bad: Tensor | None = None
    ) -> tuple[Tensor, Handle]:
        """Send [S, M] tokens, and the weights of the layout's rows, to their experts' ranks. A graph can hold it."""
        sent, sizes = self.metadata_by_operators(Routed(x_SM, layout, weight_N), bad)
        return self.send_by_operators(permute(x_SM, sent.tokens), weight_N, sent, sizes, self.way)

    def metadata_by_operators(self, routed: Routed, bad: Tensor | None) -> tuple[Sending, tuple[Tensor, Tensor]]:
        """Return the tokens to send, and the sizes of the exchange, as `exchange_metadata`. A graph can hold it."""
        x_SM, layout, weights, _ = routed
        form, sent, tokens_W = RowForm.of(x_SM, layout, weights), Sending(layout), None
        if layout.source_N is not None:
            *tokens, row_N, code_N = exchange_operators.deduplicate(layout.tensors, self.topology.ep.size)
            sent, tokens_W = Sending(Layout.of(tokens), row_N, code_N, layout.k), tokens[0]
        return sent, exchange_operators.exchange_metadata(layout.counts_E, tokens_W, bad, *form, self.way.name)

    def combine_by_operators(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """Returns [S, M], the sum of each token's results, rank by rank."""
        tokens, send_PC, come_QPC, way = handle.state
        y_TM = exchange_operators.combine(out_RM, send_PC, come_QPC, len(tokens.pair_N), way.name)
        with span(way.recorder, "unpermute", kind="unpermute", phase="forward"):
            return unpermute(y_TM, tokens)

    def by_operators(
        self, routed: Routed, experts: Callable[[Tensor, Layout, Tensor | None], Tensor], bad: Tensor | None = None
    ) -> Tensor:
        """Does all that a layer does between gate and shared expert by operators, sizes included, for graphs.

        Args:
            bad: tokens whose router logits are not finite, a scalar; all ranks end where there are any.
        """
        weight_N = weight_of_rows(routed.weight_SK, routed.layout)
        x_RM, handle = self.dispatch_by_operators(routed.x_SM, weight_N, routed.layout, bad)
        return self.combine_by_operators(experts(x_RM, handle.layout, handle.weight_N), handle)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        calls = self.calls(experts)
        if not selects():
            return self.cross(self.exchange_metadata(routed, calls), experts)
        if not isinstance(routed.refusal, str) and not self.hooks:
            # A selective checkpoint asks for operators, the exchange of sizes among them: none is to run twice.
            self.travelled = None
            return self.by_operators(routed, experts, None if routed.refusal is None else routed.refusal.number)
        with unselected():
            return self.cross(self.exchange_metadata(routed, calls), experts)

    def calls(self, experts: Any) -> ExpertCalls:
        """Returns how the experts can be called: as a module where a call of it runs hooks."""
        if not recomputing():  # a checkpoint compares what is saved: as in the forward
            self._why = why_called(experts) if must_be_called(experts) else None
        return ExpertCalls.EITHER if self._why is None else ExpertCalls.MODULE

    def cross(self, counted: CountedBatch, experts: LocalExperts, copies: CopiesInTurns | None = None) -> Tensor:
        """Send a batch through the experts; by a plan where `copies` take turns. Collective."""
        x_SM, weight_N, sent, exchange = counted
        in_chunks = cache(partial(self.in_chunks, experts, x_SM))  # parametrisations are evaluated once
        assigned = self.plans(x_SM, exchange, None if exchange.as_module else in_chunks)
        chunk_experts = None if assigned is None or exchange.as_module else in_chunks()
        # The graphs of chunks would have a checkpoint send all again from the midst of each chunk's backward.
        if chunk_experts is not None and not chunk_experts.any_degree and copies is None and packs():
            chunk_experts = None
        if assigned is None or chunk_experts is None:
            rows_RM, handle = self._dispatch(counted)
            y_RM = no_wider(self.compute(experts, rows_RM, handle, exchange), rows_RM)
            # Experts that learn take part in the backward also where they have used none of their parameters.
            own = experts.parameters() if isinstance(experts, nn.Module) else ()
            if torch.is_grad_enabled() and not y_RM.requires_grad and any(one.requires_grad for one in own):
                y_RM = y_RM.detach().requires_grad_()
            y_SM = self.combine(y_RM, handle)
            if assigned is None or assigned.gradients is None:
                return y_SM
            return reduced_behind(y_SM, assigned, None if copies is None else copies.wait)
        if not chunk_experts.any_degree:
            assigned.plans.require_one_degree()
        chunk_experts.tokens_learn = exchange.tokens_require_grad
        chunk_experts.weights_learn = exchange.weights_require_grad
        batch = RowBatch(sent, exchange, chunk_experts, self.run(assigned, exchange, x_SM.device, copies))
        return _ByPlan.apply(x_SM, weight_N, batch, *chunk_experts.parameters)

    def compute(self, experts: LocalExperts, rows_RM: Tensor, handle: Handle, exchange: Exchange) -> Tensor:
        """Calls the experts for rows that have come."""
        return experts(rows_RM, handle.layout, handle.weight_N)

    def in_chunks(self, experts: LocalExperts, x_SM: Tensor) -> ChunkExperts:
        return experts.in_chunks(x_SM)

    def run(self, assigned: Assigned, exchange: Exchange, device: torch.device, copies: CopiesInTurns | None) -> Run:
        """Makes a call's run of its plans."""
        return Run(
            assigned.plans,
            partial(self.topology.stop, self.name),
            self.hooks,
            active_recorder(),
            None if self.streams is None else self.streams.on(device),
            assigned.gradients,
            assigned.beside,
            copies,
        )


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The tokens of a call.

    Attributes:
        sent: the tokens that travel, without padding.
    """

    sent: Sending
    exchange: Exchange
    experts: ChunkExperts
    run: Run

    def chunks(self, pairs: Received, degree: int) -> RowChunks:
        return RowChunks(self.exchange, self.sent.tokens, pairs, self.sent.k, degree)


class _TokensPass(Pass):
    """A pass of rows that are all there from the beginning.

    Args:
        weights: of each chunk's sorted rows.
    """

    def __init__(self, batch: RowBatch, chunks: RowChunks, rows_TM: Tensor, weights: Sequence[Tensor | None]) -> None:
        run = batch.run
        plan = run.plans.forward if self.phase == "forward" else run.plans.backward
        # Tasks have the number of the layer in its model; a step's plan also has gradients of other layers.
        layer = next(task.layer for task in plan if task.kind == TaskKind.DISPATCH)
        super().__init__(run, {layer: batch.experts})
        self.layer = layer
        parts = zip(chunks.parts, chunks.received, weights, strict=True)
        self.own = {i: Chunk(part, layout, weight_R=weight_R) for i, (part, layout, weight_R) in enumerate(parts)}
        self.chunks[layer] = self.own
        self._rows: list[Tensor | None] = [*rows_TM.split([part.sent for part in chunks.parts])]
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

    def run(self) -> Tensor | None:
        """Runs the plan, and returns what came of the rows, in chunk order; None: no rank needs it."""
        # Copies of experts, and gradients beside the last pass, have the link before this layer's rows.
        if self.settings.copies is not None:
            self.settings.copies.wait()
        if self.settings.gradients is not None:
            self.settings.gradients.wait()
        self.execute()
        rows = [chunk_rows for chunk_rows in self._rows if chunk_rows is not None]
        self._rows.clear()
        return concatenated(rows) if rows else None


class TokensForward(_TokensPass, ForwardPass):
    """Keeps what experts were given and what they keep."""


class TokensBackward(_TokensPass, BackwardPass):
    """Goes back from what the forward pass has kept of its chunks, which may be others.

    Args:
        forward_chunks, chunks: those of the forward pass, and of this one.
        x, kept: of each chunk in the forward pass.
    """

    def __init__(
        self,
        batch: RowBatch,
        forward_chunks: RowChunks,
        chunks: RowChunks,
        rows_TM: Tensor,
        weights: Sequence[Tensor | None],
        x: Sequence[Tensor],
        kept: Sequence[Any],
    ) -> None:
        super().__init__(batch, chunks, rows_TM, weights)
        # Of each chunk here its rows among the forward's, as received and as sorted; None: the chunks are the same.
        self._places = None if chunks is forward_chunks else chunks.rows_of(forward_chunks)
        if self._places is None:
            for chunk, x_RM, chunk_kept in zip(self.own.values(), x, kept, strict=True):
                chunk.x_RM, chunk.kept = x_RM, chunk_kept
        else:
            self._x_RM, self._kept = Kept(x) if batch.experts.keeps_rows else None, Kept(kept)

    def recall(self, task: Task) -> None:
        if self._places is not None:
            number = task.chunk or 0
            chunk, (received, in_order) = self.own[number], self._places[number]
            chunk.x_RM = None if self._x_RM is None else self._x_RM.rows(received)
            chunk.kept = self._kept.rows(in_order)


class _ByPlan(Function):
    """Σ over a token's pairs of their weighted results, through the experts' ranks, by the plans of a run.

    Saved for backward: received tokens, R·M, where experts read them again (`ChunkExperts.keeps_rows`), and what the
    experts keep of P pairs, the pre-activation P·H (gated 2·P·H); where the two plans differ in degree, the backward
    copies both once.
    """

    operation = "the way through the experts of several ranks (MoELayer, moe_layer)"

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_N: Tensor | None, batch: RowBatch, *parameters: Tensor | None) -> Tensor:
        sent, exchange, experts = batch.sent, batch.exchange, batch.experts
        # Codes and router weights cross in one message of their own before the first chunk: pairs lie by token.
        pairs, weight_P = exchange.exchange_pairs(sent.code_N, weight_N, sent.row_N, sent.k)
        chunks = batch.chunks(pairs, batch.run.plans.degrees[0])
        weights = [None] * len(chunks.parts) if weight_P is None else chunks.split(weight_P)
        forward = TokensForward(batch, chunks, kernels.permute(x_SM, chunks.layout), weights)
        out_TM = forward.run()
        assert out_TM is not None
        received, kept = zip(*((chunk.x_RM, chunk.kept) for chunk in forward.own.values()), strict=True)
        # What a chunk keeps is a tensor, or a graph of its own.
        tensors = kept if experts.any_degree else ()
        # A graph keeps what the backward needs, and no module: see `ChunkExperts.for_backward`.
        ctx.batch = replace(batch, experts=experts.for_backward(), run=replace(batch.run, arrive=None))
        ctx.kept, ctx.pairs, ctx.chunks = () if tensors else kept, pairs, chunks
        ctx.rows = None if weight_N is None else len(weight_N)
        ctx.save_for_backward(*received, *weights, *tensors, *parameters)
        return kernels.gather_sum(out_TM, chunks.layout)

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        batch: RowBatch = ctx.batch
        forward_chunks, exchange = ctx.chunks, batch.exchange
        # Ranks compare first what they call: another one may have no backward pass.
        exchange.turn()
        degree, count = batch.run.plans.degrees[1], len(forward_chunks.parts)
        chunks = forward_chunks if degree == count else batch.chunks(ctx.pairs, degree)
        saved = ctx.saved_tensors
        received, weights, rest = saved[:count], saved[count : 2 * count], saved[2 * count :]
        kept = rest[:count] if batch.experts.any_degree else ctx.kept
        if not retains_graph():
            ctx.kept = None
        parameters = rest[count:] if batch.experts.any_degree else rest
        if chunks is not forward_chunks:
            weights = (None,) * degree if ctx.rows is None else chunks.split(forward_chunks.join(weights))
        rows_TM = kernels.permute(dy_SM.contiguous(), chunks.layout)
        # Weights that experts join for a pass are this pass's own, and go with it.
        batch = replace(batch, experts=batch.experts.for_backward())
        backward = TokensBackward(batch, forward_chunks, chunks, rows_TM, weights, received, kept)
        dtype = weights[0].dtype if ctx.rows is not None else None
        # Chunks give up what they have used; a name here would keep all of it to the end.
        del saved, received, kept, rest, rows_TM
        dx_TM, dweight_N = backward.run(), None
        dx_SM = None if dx_TM is None else kernels.gather_sum(dx_TM, chunks.layout)
        if ctx.rows is not None and exchange.weights_require_grad:
            # Gradients of weights go home in one message after the last chunk, as the weights have come.
            dweights = [chunk.weight_R.to(dtype) for chunk in backward.own.values() if chunk.weight_R is not None]
            dweight_N = exchange.return_weights(chunks.join(dweights), batch.sent.row_N, ctx.rows)
        totals, copies = backward.totals[backward.layer], batch.run.copies
        # Their gradients have the link once the rows are through; the layer before waits for them.
        if copies is not None:
            copies.send_back(batch.experts.parameters, totals)
        if batch.run.gradients is not None:
            batch.run.gradients.begin(batch.run.beside, None if copies is None else copies.wait)
        return dx_SM, dweight_N, None, *gradients_of(totals, parameters)
