"""A block as a stack of layers calls it (`fusedmoe.blocks.stack`): modules, told apart from what runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe.autograd.hooks import Hooks
from fusedmoe.autograd.materialise import SendBack, send_totals
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.state import Choice, Dense, OrderedRows, Share
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.group import Group
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, Totals
from fusedmoe.engine.dispatcher import Collectives, recomputing
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import Layout, contiguous_layout
from fusedmoe.layers.expert_networks import Experts
from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.layers.gates.router import outside_autocast
from fusedmoe.layers.input_checks import check_routing, of_input
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.mp_tokens import MpTokens
from fusedmoe.layers.orders import Dropless, Order, Ordered
from fusedmoe.layers.wire_hooks import enter, leave
from fusedmoe.runtime.recorder import Recorder


class BlockStage:
    """One block.

    Args:
        dense, layer: its parts.
        sizes: carries the sizes of exchanges beside what the layer's own groups carry.
        in_positions: the dense part takes positions, and what it gave for those before.
        recompute: keep the dense part's input only.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, sizes: Group, in_positions: bool, recompute: bool) -> None:
        self._layer, self._sizes, self._recompute = layer, sizes, recompute
        tokens = layer.mp_tokens
        self.orders = not layer.order.copies
        self.ends = bool(layer.hooks) or tokens.joint or self.orders
        self._dense = _DensePart(dense, layer, in_positions, self.ends)
        self._names = [name for name, _ in self._dense.named_parameters()]
        self._collectives = Collectives(layer.topology, make_all_to_all(layer.dispatch, layer.topology))
        topology, gate = layer.topology, layer.gate
        self.hooks: Sequence[Hooks] = layer.hooks
        self.experts_in_all = gate.experts
        # Rows come back while dense parts may communicate over the MP group.
        group = topology.beside(topology.mp, "joins") if tokens.joint else Group("mp")
        self.mp, self._joins = group, MpTokens(group, layer.mp_input)
        self._refusal: str | None = None
        self.returns: Callable[[Totals], None] | None = None
        self._limited = _limited(gate, layer.order)
        self.waits = must_wait(gate, layer.order, in_positions)
        like = next(layer.experts.parameters(), torch.empty(0))
        self.any_degree = layer.experts.in_chunks(like).any_degree

    def require_nothing_between_layers(self) -> None:
        """Layers in micro-batches are at work all at once: nothing happens between one and the next, and copies of
        experts are made before the first gate has chosen.

        Raises:
            ConfigError: what is to happen there.
        """
        if (placed := self._layer.placed) is None:
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

    def whole(self, x: Tensor, recorder: Recorder | None) -> Tensor:
        """The block of a whole batch at once, [B, …, M] -> [B, …, M], its layer by the layer's own plans."""
        self._layer.recorder = recorder
        y, u = self._computed(self._dense.whole, x)
        z: Tensor = y + self._layer(u)
        return z

    @property
    def dense_parameters(self) -> list[nn.Parameter]:
        return list(self._dense.parameters())

    def capacity(self, tokens: int) -> int | None:
        return self._layer.gate.row_capacity(tokens) if self._limited else None

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        return self._layer.gate.draw(x_SM)

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        share: Share,
        drawn: tuple[Tensor, ...],
        past: Sequence[tuple[Tensor, ...]],
        later: DeferredGradients | None,
    ) -> Dense:
        named, part = dict(zip(self._names, parameters, strict=True)), self._dense  # a graph may keep what computes
        for name, parameter in named.items():
            if not name.startswith("dense."):
                named[name] = self._layer.mp_tokens.whole_gradient(parameter)

        def compute(x: Tensor, past: Sequence[tuple[Tensor, ...]]) -> Any:
            with nullcontext() if later is None else later:
                return torch.func.functional_call(part, named, (x, share, drawn, past))

        with self._refusing():
            y, u, shared, scores, own = self._computed(compute, x, past)
            # Losses are the whole batch's.
            gate = copy.copy(self._layer.gate)
            gate.aux = {}
            with outside_autocast(u.device.type):
                routing = gate.choose(*scores)
            check_routing(gate, routing, u.reshape(-1, u.shape[-1])[share.own])
        assert isinstance(routing, Routing)
        return Dense(y, u, shared, scores, routing, own)

    @property
    def communicates(self) -> bool:
        """Whether the dense part may: over the MP group."""
        return self._layer.topology.mp.size > 1

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Tells the other ranks of a refusal where they may wait in their dense parts, and not for an exchange."""
        try:
            yield
        except ConfigError as error:
            if self.communicates:
                self._layer.checks.refuse(str(error))
            raise

    def _computed(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """What it gives; where activations are not kept, all of it is computed again in the backward pass."""
        if not (self._recompute and torch.is_grad_enabled()):
            return compute(*inputs)
        # To its end: a dense part that communicates must do so on all ranks alike.
        with set_checkpoint_early_stop(False):
            return checkpoint(compute, *inputs, use_reentrant=False)

    def order(self, u_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Ordered:
        routing = Routing(expert_SK, weight_SK, None, None, u_SM.new_zeros(()), None)
        return self._layer.order.order(u_SM, routing, self.experts_in_all)

    def restore(self, y_SM: Tensor, ordered: OrderedRows) -> Tensor:
        assert isinstance(ordered, Ordered)
        return self._layer.order.restore(y_SM, ordered)

    def end(self, y: Tensor, share: Share) -> Tensor:
        z_SM = self._joins.join(y.reshape(-1, y.shape[-1])[share.own], share.rows)
        z = leave(self.hooks, z_SM.view(y.shape), share.number, share.of)
        return _unchanged(z, y, "before_moe_end")

    def choose(self, scores: tuple[Tensor, ...]) -> Routing:
        with outside_autocast(scores[0].device.type):
            routing = self._layer.gate.choose(*scores)
        assert isinstance(routing, Routing)
        return routing

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        assert isinstance(routing, Routing)
        layer = self._layer
        layer.load.count(routing, layer.gate, layer.training)
        layer.load.keep(kept_E)

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice], refusal: str | None) -> Exchange:
        checks, topology = self._layer.checks, self._layer.topology
        found = (checks.of_logits(routing) for routing in routings if isinstance(routing, Routing))
        refusal = refusal or self._refusal or next((text for text in found if text), None)
        if topology.ep.size == topology.esp.size == 1:
            checks.refuse(refusal)
        return self._collectives.exchange(counts, like.dtype, refusal, sizes=self._sizes)

    @property
    def held(self) -> int | None:
        placed = self._layer.placed
        return None if placed is None else max(1, len(placed.held))

    def places(self, layout: Layout) -> Layout:
        placed = self._layer.placed
        assert placed is not None
        if placed.travel != "by tasks":
            placed.arrive()  # they have been on their way while the layers before were at work
        return placed.split(layout, self._learns)

    def gather(self) -> None:
        placed = self._layer.placed
        assert placed is not None
        placed.arrive()

    def experts(self, like: Tensor) -> ChunkExperts:
        self.returns = None
        experts, placed = self._layer.experts, self._layer.placed
        like = like.new_empty(0, dtype=experts.row_dtype(like))
        if placed is None:
            return experts.in_chunks(like)
        again = recomputing()
        self._learns = experts.training and not again
        placed.come_in_turn(again, self._layer.recorder)
        self._refusal = placed.refusal()
        own = next(experts.parameters()).dtype
        arrived = own != like.dtype or placed.parametrised  # what is made of parameters is made now
        chunks, self.returns = placed.call(partial(_of_tables, like), again, arrived=arrived)
        return chunks


class _DensePart(nn.Module):
    """What a block computes of a piece by itself: its dense part, the shared expert, and the gate's scores.

    `ends`: what the shared expert gives goes with the experts' results; else it is a part of y.
    """

    def __init__(self, dense: nn.Module, layer: MoELayer, in_positions: bool, ends: bool) -> None:
        super().__init__()
        self.dense, self.gate, self.shared = dense, layer.gate, layer.shared
        self._hooks, self._tokens, self._ends = layer.hooks, layer.mp_tokens, ends
        self._row_dtype, self._in_positions = layer.experts.row_dtype, in_positions
        self._of_experts = layer.experts.parameters  # which are not its own

    def forward(
        self, x: Tensor, share: Share, drawn: tuple[Tensor, ...], past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
        y, u, own = self._found(x, past)
        u = _unchanged(enter(self._hooks, u, share.number, share.of), x, "before_moe_start")
        u_SM = self._tokens.take(u.reshape(-1, x.shape[-1]), share.rows)
        with outside_autocast(u_SM.device.type):
            scores = self.gate.score(u_SM, *drawn)
        u_SM = u_SM.to(self._row_dtype(u_SM))
        shared: Tensor | None = None
        if self.shared is not None:
            every = contiguous_layout(torch.full((1,), len(u_SM), device=u_SM.device), len(u_SM))
            shared = share.spread(self.shared(u_SM, every, None)).view(y.shape)
        if shared is not None and not self._ends:
            y, shared = y + shared, None
        return y, share.spread(u_SM).view(x.shape), shared, scores, own

    def whole(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and u of a whole batch."""
        return self._found(x, ())[:2]

    def _found(self, x: Tensor, past: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if self._in_positions:
            y, u, own = self._results(self.dense(x, past), x, ("y", "u", "own"))
            return y, u, own
        y, u = self._results(self.dense(x), x, ("y", "u"))
        return y, u, ()

    def _results(self, found: Any, x: Tensor, names: tuple[str, ...]) -> tuple[Any, ...]:
        """What the dense part gave. A tensor by itself would come apart into samples."""
        dense, shape = type(self.dense).__name__, list(x.shape)
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            got = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise ConfigError(f"pipeline: the dense part {dense} gave {got}; it must give ({', '.join(names)})")
        for name, one in zip(("y", "u"), found, strict=False):
            if isinstance(one, Tensor) and one.shape != x.shape:
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is {list(one.shape)}, not {shape} as x")
            if isinstance(one, Tensor) and one.device != x.device:
                raise ConfigError(f"pipeline: {name} of the dense part {dense} is on {one.device}, x on {x.device}")
            like: Tensor | None = next(self._of_experts(), None) if name == "u" else None
            if text := of_input(f"pipeline: the dense part {dense} gave {name}", one, x.shape[-1], like):
                raise ConfigError(text)
        return tuple(found)


def _of_tables(
    like: Tensor, experts: Experts, send: SendBack | None
) -> tuple[ChunkExperts, Callable[[Totals], None] | None]:
    """Experts that keep the parameters that they have now, and what brings gradients to where they belong."""
    chunks, named = experts.in_chunks(like), dict[str, Tensor](experts.named_parameters())
    if not chunks.any_degree:
        chunks = AutogradExperts(lambda *rows: torch.func.functional_call(experts, named, rows), tuple(named.values()))
    if send is None:
        return chunks, None
    tables, made = tuple(named.values()), chunks.parameters

    def back(totals: Totals) -> None:
        send_totals(send, tables, made, totals).wait()

    return chunks, back


def _unchanged(found: Tensor, like: Tensor, seam: str) -> Tensor:
    """What hooks made of some samples: pieces of it go on by themselves."""
    if found.shape != like.shape:
        raise ConfigError(
            f"pipeline: hooks at {seam} made {list(found.shape)} of {list(like.shape)}. Between blocks tokens keep "
            "their shape: change it in the dense parts, or use MoELayer(schedule=…) with such hooks"
        )
    return found


def must_wait(gate: Gate, order: Order | None, in_positions: bool) -> bool:
    """Whether it takes all of a batch to know which rows an expert has no room for.

    `order`: None: the one that a layer has by default. `in_positions`: sequences are cut, not batches.
    """
    # Of a sample's first positions nobody knows what the samples before it will ask for.
    return _limited(gate, order) and (gate.k > 1 or in_positions)


def _limited(gate: Gate, order: Order | None) -> bool:
    return gate.capacity_factor is not None and not isinstance(order, Dropless)
