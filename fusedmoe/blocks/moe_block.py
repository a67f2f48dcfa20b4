"""One block as the passes call it: a dense part (attention, say) and its `MoELayer`, for micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe.autograd.materialise import SendBack, send_totals
from fusedmoe.autograd.parallel import MpTokens
from fusedmoe.blocks.cuts import BlockDegrees, MicroBatch, cut
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.state import BlockState, Split
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import ExpertCalls, RowForm, TokenCounts
from fusedmoe.compat.torch import module_states
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, Totals
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.engine.module_hooks import first_hook, has_parametrisations, replaced_forward
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts
from fusedmoe.gates.base import Gate, Routing, outside_autocast
from fusedmoe.gates.choosing import Choosing, GivenExperts
from fusedmoe.hooks import enter, leave
from fusedmoe.kernels.layout import Layout, contiguous_layout
from fusedmoe.layers.input_checks import check_routing, of_input
from fusedmoe.layers.moe import MoELayer
from fusedmoe.orders import Ordered
from fusedmoe.runtime.recorder import Recorder


class DenseResult(NamedTuple):
    """Results of a block for a micro-batch by itself.

    Attributes:
        y: the residual stream, like x.
        u: what the experts see, like x, in the dtype in which it travels.
        shared: what comes to the experts' results before `MoEBlock.end`, like x; None: nothing.
        scores: of the gate, [S, …] each, of the tokens that this rank routes.
        routing: by these scores.
        own: tensors that later micro-batches of the same samples need; empty where micro-batches are whole samples.
    """

    y: Tensor
    u: Tensor
    shared: Tensor | None
    scores: tuple[Tensor, ...]
    routing: Routing
    own: tuple[Tensor, ...]


class MoEBlock:
    """One block, a dense part and its `MoELayer`, as the passes call it: by micro-batches between exchanges.

    Args:
        dense, layer: its parts.
        sizes: carries the sizes of exchanges beside what the layer's own groups carry.
        in_positions: the dense part takes positions, and what it gave for those before.
        recompute: keep the dense part's input only.
    Attributes:
        num_experts: E.
        makes_rows: rows are made by an order by products, and restored in `end`; else they are copies of tokens.
        ends: experts' results go through `end`; else they are added to y as they come.
        limited: experts have no room for more rows than the gate's capacity.
        waits: which rows are dropped is known only once all tokens of a batch are routed.
        mp: ranks that have the same tokens, of which each routes a slice; a group of one where each has its own.
        any_degree: both passes may have chunks of their own.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, sizes: Group, in_positions: bool, recompute: bool) -> None:
        self.layer, self._sizes, self._recompute = layer, sizes, recompute
        gate, order, topology, tokens = layer.gate, layer.order, layer.topology, layer.mp_tokens
        self.num_experts, self.hooks = gate.experts, layer.hooks
        self.makes_rows = not order.copies
        self.ends = bool(layer.hooks) or tokens.joint or self.makes_rows
        self.limited = gate.capacity_factor is not None and order.drops
        # Of a token's second choices nobody knows their place before all first ones have theirs; of a sample's first
        # positions nobody knows what the samples before it will ask for.
        self.waits = self.limited and (gate.k > 1 or in_positions)
        self._dense = _DensePart(dense, layer, in_positions, self.ends)
        self._names: list[str] = []  # of `dense_parameters` when the last call began
        # A batch in pieces begins with no batch to try algorithms with.
        algorithm = "direct" if layer.dispatch == "auto" else layer.dispatch
        self._collectives = Collectives(topology, make_all_to_all(algorithm, topology))
        # Rows come back while dense parts may communicate over the MP group.
        self.mp = topology.beside(topology.mp, "joins") if tokens.joint else Group("mp")
        self._joins = MpTokens(self.mp, layer.mp_input)
        self._refusal: str | None = None
        # Whether experts are kernels of the library's or modules by autograd does not change afterwards.
        like = next(layer.experts.parameters(), torch.empty(0, device="cpu"))
        self.any_degree = layer.experts.in_chunks(like).any_degree

    def require_nothing_between_layers(self) -> None:
        """Layers in micro-batches are at work all at once: nothing happens between one and the next, and copies of
        experts are made before the first gate has chosen.

        Raises:
            ConfigError: what is to happen there.
        """
        if (placed := self.layer.placed) is None:
            return
        for wrong, text in (
            (placed.clocked, "overlap=None measures the time between two layers: give ShardedExperts(overlap=…)"),
            (placed.rematerialises, "rematerialises=True gives copies back after each layer: use rematerialises=False"),
            (
                placed.correct is not None,
                "copies are made once a gate has chosen for a whole batch: use policy='hecate' without calibrates",
            ),
        ):
            if wrong:
                raise ConfigError(f"pipeline: {text}, or MoELayer(schedule=…) in place of the pipeline")

    def whole(self, x: Tensor, mask: Tensor | None, recorder: Recorder | None) -> Tensor:
        """The block of a whole batch at once, [B, …, M] -> [B, …, M], its layer by the layer's own plans."""
        self.layer.recorder = recorder
        try:
            y, u = self._computed(self._dense.whole, x)
        except ConfigError as error:
            self.refuse(str(error))
            raise
        placed = self.layer.placed
        by_tasks = placed is not None and placed.travel == "by tasks"
        if placed is not None and by_tasks:
            placed.travel = "at once"  # the plan whose tasks bring copies is not followed
        try:
            # The layer adds its shared expert itself, and calls its own hooks.
            z: Tensor = y + self.layer(u, mask)
        finally:
            if placed is not None and by_tasks:
                placed.travel = "by tasks"
        return z

    def refuse(self, refusal: str) -> None:
        """Raise `refusal` on all ranks: where they exchange tokens next, unless they may wait in a dense part."""
        if self.communicates:
            self.layer.checks.refuse(refusal)
        self.layer.refuse(refusal)

    @property
    def why_called(self) -> str | None:
        """Why the modules must be called for whole batches: micro-batches would skip hooks on the layer and its parts,
        or repeat those on the dense part, and evaluate a parametrisation for each. None: they need not be."""
        dense, layer = self._dense.dense, self.layer
        # What shards a dense part runs in each of its calls.
        hook = first_hook(dense, ("fusedmoe", "torch.distributed")) or first_hook(layer, ("fusedmoe",))
        hook = hook or replaced_forward(layer.experts) or replaced_forward(layer.gate)
        parts = [dense, layer.gate, layer.shared, None if layer.experts.reads_once else layer.experts]
        parametrised = (part for part in parts if part is not None and has_parametrisations(part))
        return hook or next((f"a parametrisation in {type(part).__name__}" for part in parametrised), None)

    @property
    def dense_parameters(self) -> list[nn.Parameter]:
        return list(self._named_parameters().values())

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        # A decoder block of another library has its experts inside; their gradients come by the exchange.
        of_experts = {id(parameter) for parameter in self.layer.experts.parameters()}
        return {name: one for name, one in self._dense.named_parameters() if id(one) not in of_experts}

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        micro_batch: MicroBatch,
        drawn: tuple[Tensor, ...],
        given: GivenExperts | None,
        past: Sequence[tuple[Tensor, ...]],
        later: DeferredGradients | None,
        beside: object = None,
    ) -> DenseResult:
        """Computes dense part and gate of one micro-batch, [b, …, M].

        Args:
            parameters: to compute with in place of `dense_parameters`.
            drawn: of the gate, for the tokens that this rank routes.
            given: the experts of these tokens, where they are replayed.
            past: `own` of the micro-batches before of the same samples.
            later: takes the weight gradients that may be computed later; None: none may.
            beside: what a `RoutingDense` takes beside x.
        Raises:
            ConfigError: what this rank made of the micro-batch is none to go on with; the next exchange tells the
                other ranks.
        """
        named, part = dict(zip(self._names, parameters, strict=True)), self._dense  # a graph may keep what computes
        for name, parameter in named.items():
            # All MP ranks have gate and shared expert, and route slices of the tokens: gradients are summed over them.
            if not name.startswith("dense."):
                named[name] = self.layer.mp_tokens.whole_gradient(parameter)

        def compute(x: Tensor, past: Sequence[tuple[Tensor, ...]]) -> Any:
            with nullcontext() if later is None else later:
                return torch.func.functional_call(part, named, (x, micro_batch, drawn, given, past, beside))

        try:
            y, u, shared, scores, own = self._computed(compute, x, past)
            # Losses are the whole batch's: here a copy of the gate without any chooses.
            gate = copy.copy(self.layer.gate)
            gate.aux = {}
            with outside_autocast(u.device.type), _choosing(gate, given):
                routing = gate.choose(*scores)
            check_routing(gate, routing, u.reshape(-1, u.shape[-1])[micro_batch.own])
        except ConfigError as error:
            # Where other ranks may wait in their dense parts, and not for an exchange, they are told now.
            if self.communicates:
                self.layer.checks.refuse(str(error))
            raise
        assert isinstance(routing, Routing)
        return DenseResult(y, u, shared, scores, routing, own)

    @property
    def communicates(self) -> bool:
        """True where the dense part may communicate: over the MP group, or where FSDP2 shards modules of it."""
        return self.layer.topology.mp.size > 1 or any(module in module_states for module in self._dense.modules())

    def _computed(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Calls `compute`; where activations are not kept, all of it is computed again in the backward pass."""
        if not (self._recompute and torch.is_grad_enabled()):
            return compute(*inputs)
        # To its end: a dense part that communicates must do so on all ranks alike.
        with set_checkpoint_early_stop(False):
            return checkpoint(compute, *inputs, use_reentrant=False)

    def order(self, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Ordered:
        """Makes the rows of some tokens, of which none is to be dropped any more. Differentiable."""
        routing = Routing(expert_SK, weight_SK, None, None, u_SM.new_zeros(()), None)
        return self.layer.order.order(u_SM, routing, self.num_experts)

    def end(self, y: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Makes the block's output for some samples of the experts' results [b, …, M], zero for tokens that other ranks
        route. Differentiable; collective over `mp`, but for its backward."""
        z_SM = self._joins.join(y.reshape(-1, y.shape[-1])[micro_batch.own], micro_batch.rows)
        z = leave(self.hooks, z_SM.view(y.shape), micro_batch.number, micro_batch.count)
        return _unchanged(z, y, "before_moe_end")

    def choose(self, scores: tuple[Tensor, ...], given: GivenExperts | None) -> Routing:
        """Routes the whole batch, for its auxiliary loss."""
        gate = self.layer.gate
        with outside_autocast(scores[0].device.type), _choosing(gate, given):
            routing = gate.choose(*scores)
        assert isinstance(routing, Routing)
        if gate.tap is not None:
            gate.tap.note(None if given is None else given.chosen(routing.expert_SK), routing.expert_SK)
        return routing

    def exchange(
        self,
        counts: Tensor,
        tokens_Pp: Tensor,
        like: Tensor,
        routings: Sequence[Routing],
        refusal: str | None,
        learns: bool,
    ) -> Exchange:
        """Tells the ranks how many tokens and pairs of a chunk go where, and whether anything is wrong with its logits.

        Args:
            counts: pairs by (peer, micro-batch, its local expert), flat.   tokens_Pp: tokens by peer and micro-batch.
            like: of the rows' dtype.   learns: this rank needs the blocks' backward.
        """
        checks, topology = self.layer.checks, self.layer.topology
        texts = (checks.of_logits(routing) for routing in routings)
        # Logits that are not finite are told with the sizes: nothing has been sent by then.
        refusal = refusal or self._refusal or next((text for text in texts if text), None)
        if topology.ep.size == topology.esp.size == 1:
            checks.refuse(refusal)  # in a world of one no exchange would raise it
        # A rank that refuses has no routing, and its form is not compared.
        k, weights = (routings[0].expert_SK.shape[-1], routings[0].weight_SK.dtype) if routings else (0, None)
        form = RowForm(like.dtype, self.layer.model_dim, k, weights)
        return self._collectives.exchange(
            counts,
            form,
            refusal or checks.bad_logits(*routings),
            tokens=TokenCounts(tokens_Pp, by_pairs=self.makes_rows),
            shard_counts=self._sizes,
            expert_calls=ExpertCalls.CHUNKS,
            tokens_require_grad=learns,
            weights_require_grad=learns,
        )

    def places(self, layout: Layout) -> Layout:
        """Sorts rows that are sorted by expert by the places of its copies. Collective over the experts' ranks."""
        placed = self.layer.placed
        assert placed is not None
        if placed.travel != "by tasks":
            placed.arrive()  # they have been on their way while the layers before were at work
        return placed.split(layout, self._learns, adds=False)

    def begin(self, x: Tensor, split: Split, degrees: BlockDegrees, keep: bool) -> BlockState:
        """Begins a call for a batch like x, [B, …, M]: makes the state that both passes share. Copies of experts start
        on their way. Collective over the experts' ranks, under a placement.

        Args:
            keep: a backward pass will follow.
        """
        # Leaves in place of the model's parameters: hooks on those see whole gradients only, not micro-batches'.
        named = self._named_parameters()  # in each call anew: adapters may have come since the last
        self._names, own = list(named), list(named.values())
        leaves = [parameter.detach().requires_grad_(keep and parameter.requires_grad) for parameter in own]
        cuts = cut(degrees.dense, degrees.rows, split.axis, x.shape[split.axis])
        experts, placed = self.layer.experts, self.layer.placed
        like = x.new_empty(0, dtype=experts.row_dtype(x))
        if placed is None:
            return BlockState(experts.in_chunks(like), self.hooks, own, leaves, cuts, degrees)
        again = recomputing()
        self._learns = experts.training and not again
        placed.come_in_turn(again, self.layer.recorder)
        self._refusal = placed.refusal()
        # What is made of parameters, casts above all, is made now, and so copies must have arrived.
        arrived = next(experts.parameters()).dtype != like.dtype or placed.parametrised
        chunks, returns = placed.call(partial(_of_tables, like), again, arrived=arrived)
        held = max(1, len(placed.held))
        return BlockState(chunks, self.hooks, own, leaves, cuts, degrees, held, returns if keep else None)


class RoutingDense(nn.Module):
    """Base of dense parts that have the router inside: (y, u, scores) = dense(x, beside).

    `scores` are what the layer's gate chooses by, [S, …] each of all tokens of x. `beside` is what else the block takes
    of the same samples (`PipelinedBlocks.forward`).
    """


class _DensePart(nn.Module):
    """Computes what a block does with a micro-batch by itself: dense part, shared expert, and the gate's scores.

    Args:
        ends: what the shared expert gives goes with the experts' results; else it is a part of y.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, in_positions: bool, ends: bool) -> None:
        super().__init__()
        self.dense, self.gate, self.shared = dense, layer.gate, layer.shared
        self._hooks, self._tokens, self._ends = layer.hooks, layer.mp_tokens, ends
        self._row_dtype, self._in_positions = layer.experts.row_dtype, in_positions
        self._of_experts = layer.experts.parameters  # which are not its own

    def forward(
        self,
        x: Tensor,
        micro_batch: MicroBatch,
        drawn: tuple[Tensor, ...],
        given: GivenExperts | None,
        past: Sequence[tuple[Tensor, ...]],
        beside: object = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
        y, u, own, scores = self._found(x, past, beside)
        u = _unchanged(enter(self._hooks, u, micro_batch.number, micro_batch.count), x, "before_moe_start")
        # Ranks of an MP group that have the same tokens route a slice each.
        u_SM = self._tokens.take(u.reshape(-1, x.shape[-1]), micro_batch.rows)
        if micro_batch.real is not None:
            u_SM = u_SM.index_select(0, micro_batch.real)
        if isinstance(self.dense, RoutingDense):
            scores = tuple(score[micro_batch.own] for score in scores)
        else:
            with outside_autocast(u_SM.device.type), _choosing(self.gate, given):
                scores = self.gate.score(u_SM, *drawn)
        u_SM = u_SM.to(self._row_dtype(u_SM))
        shared: Tensor | None = None
        if self.shared is not None:
            # One expert that has all rows, in order.
            every = contiguous_layout(torch.full((1,), len(u_SM), device=u_SM.device), len(u_SM))
            shared = micro_batch.spread(self.shared(u_SM, every, None)).view(y.shape)
        # Without an end of the block to go through, it is added where its graph is, and needs no gradient of its own.
        if shared is not None and not self._ends:
            y, shared = y + shared, None
        return y, micro_batch.spread(u_SM).view(x.shape), shared, scores, own

    def whole(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y and u of a whole batch."""
        return self._found(x, (), None)[:2]

    def _found(
        self, x: Tensor, past: Sequence[tuple[Tensor, ...]], beside: object
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns y and u, the tensors that later micro-batches need, and scores, if the dense part makes them."""
        if isinstance(self.dense, RoutingDense):
            y, u, scores = self._results(self.dense(x, beside), x, ("y", "u", "scores"))
            return y, u, (), scores
        if self._in_positions:
            y, u, own = self._results(self.dense(x, past), x, ("y", "u", "own"))
            return y, u, own, ()
        y, u = self._results(self.dense(x), x, ("y", "u"))
        return y, u, (), ()

    def _results(self, given: Any, x: Tensor, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Checks what the dense part gave, and returns it. A tensor by itself would come apart into samples."""
        dense, shape = type(self.dense).__name__, list(x.shape)
        if not isinstance(given, (tuple, list)) or len(given) != len(names):
            got = f"{len(given)} results" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
            raise ConfigError(f"pipeline: the dense part {dense} gave {got}; it must give ({', '.join(names)})")
        for name, result in zip(("y", "u"), given, strict=False):
            if isinstance(result, Tensor) and result.shape != x.shape:
                sizes = f"{list(result.shape)}, not {shape} as x"
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is {sizes}")
            if isinstance(result, Tensor) and result.device != x.device:
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is on {result.device}, x on {x.device}")
            like: Tensor | None = next(self._of_experts(), None) if name == "u" else None
            if text := of_input(f"pipeline: the dense part {dense} gave {name}", result, x.shape[-1], like):
                raise ConfigError(text)
        return tuple(given)


def _of_tables(
    like: Tensor, experts: Experts, send: SendBack | None
) -> tuple[ChunkExperts, Callable[[Totals], None] | None]:
    """Makes experts that keep the parameters that they have now, and what brings gradients to where they belong."""
    chunks, named = experts.in_chunks(like), dict[str, Tensor](experts.named_parameters())
    # Modules by autograd must compute with the tables that are in place now, also when the chunk's turn comes.
    if not chunks.any_degree:
        compute = partial(torch.func.functional_call, experts, named)
        chunks = AutogradExperts(lambda *rows: compute(rows), tuple(named.values()), experts)
    if send is None:
        return chunks, None
    tables, made = tuple(named.values()), chunks.parameters

    def back(totals: Totals) -> None:
        send_totals(send, tables, made, totals).wait()

    return chunks, back


def _choosing(gate: Gate, given: GivenExperts | None) -> AbstractContextManager[Any]:
    """A context in which a gate chooses these experts; None: as it does."""
    return nullcontext() if given is None else Choosing(gate.experts, lambda *_: given)


def _unchanged(made: Tensor, like: Tensor, seam: str) -> Tensor:
    """Returns what hooks made of some samples, if its shape is theirs: micro-batches of it go on by themselves."""
    if made.shape != like.shape:
        raise ConfigError(
            f"pipeline: hooks at {seam} made {list(made.shape)} of {list(like.shape)}. Between blocks tokens keep "
            "their shape: change it in the dense parts, or use MoELayer(schedule=…) with such hooks"
        )
    return made
