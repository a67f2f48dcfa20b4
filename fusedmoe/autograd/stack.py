"""A stack of layers in micro-batches: dense parts, dispatch, experts and combine as tasks of one plan for each pass.

A batch is cut along its samples (`autograd/pieces.py`), and each piece goes through a layer's dense part and gate by
itself; its rows travel with those of the other pieces of its chunk. The backward is written out, task by task, from
what the forward stored: of each piece the graph of its dense part and gate, of each chunk received rows and
pre-activations. What a row meets on its way is what it would meet in the whole batch: the gate chooses token by token,
and rows that exceed an expert's capacity are those that would in the whole batch (Lancet §5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe.autograd.chunk_experts import ChunkExperts, Totals
from fusedmoe.autograd.hooks import Direction
from fusedmoe.autograd.order import order, take_slots
from fusedmoe.autograd.pieces import Cuts, Received, Regrouped, Sent, counts_of
from fusedmoe.autograd.pipeline import Plans
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.kernels.gather_sum import gather_sum, permute, put_slots
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.task import Task


class Choice(Protocol):
    """What a stack needs of a gate's routing; see `fusedmoe.layers.gates.Routing`."""

    expert_SK: Tensor
    weight_SK: Tensor
    aux_loss: Tensor


class Stage(Protocol):
    """One layer as the stack calls it.

    Attributes:
        experts_in_all: E.   capacity: rows that an expert takes of so many tokens; None: all.
        waits: whether it takes all tokens to know which rows an expert has no room for.
    """

    experts_in_all: int
    waits: bool

    def capacity(self, tokens: int) -> int | None: ...

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        """What belongs to the tokens of a batch beside x: random numbers, above all. First dimensions are tokens'."""
        ...

    def piece(
        self, parameters: Sequence[Tensor], x: Tensor, drawn: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Choice]:
        """Some samples [b, …, M] -> the residual stream, of the same shape; the experts' input as it travels, [S, M];
        scores; routing. `parameters`: to compute with in place of `dense_parameters`."""
        ...

    def choose(self, scores: tuple[Tensor, ...]) -> Choice: ...

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        """Told the routing of the whole batch, and how many rows of each expert were kept of it."""
        ...

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice]) -> Exchange: ...

    def experts(self, like: Tensor) -> ChunkExperts: ...

    @property
    def dense_parameters(self) -> Sequence[Tensor]:
        """Of dense part and gate."""
        ...


@dataclass(frozen=True, eq=False)
class Stack:
    """What a call of `through_stack` needs beside tensors."""

    stages: Sequence[Stage]
    cuts: Cuts
    plans: Plans
    peers: int
    stop: Callable[[BaseException], None]
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None


@dataclass(eq=False)
class _Piece:
    """A piece in one layer: the graph of its dense part and gate, and where its rows go."""

    x: Tensor
    y: Tensor
    u_SM: Tensor
    scores: tuple[Tensor, ...]
    routing: Choice
    layout: Layout | None = None
    weight_N: Tensor | None = None


@dataclass(eq=False)
class _Chunk:
    """A chunk's rows in one layer and one pass."""

    sent: Sent
    part: Part
    received: Received
    rows: Tensor
    weights: Tensor | None = None  # of received rows, and gradients of them
    x_RM: Tensor | None = None
    kept: Any = None


@dataclass(eq=False)
class _Layer:
    stage: Stage
    experts: ChunkExperts
    parameters: list[Tensor]  # of the dense part, leaves of their own: hooks of the real ones see whole gradients only
    pieces: list[_Piece | None]
    chunks: list[_Chunk | None]
    sizes: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    taken_E: Tensor | None = None
    placed: int = 0  # pieces whose rows have their place
    out: list[Tensor | None] = field(default_factory=list)
    dscores: list[tuple[Tensor | None, ...]] = field(default_factory=list)  # of the auxiliary loss, of each piece
    exchange: Exchange | None = None


class _Pass:
    """What both passes have in common."""

    def __init__(self, stack: Stack, phase: Direction, layers: list[_Layer]) -> None:
        self._stack, self._phase, self.layers = stack, phase, layers
        self._chunks: list[list[_Chunk | None]] = []
        self._alive: list[Tensor] = []

    def _execute(self) -> None:
        stack, plan = self._stack, self._stack.plans.of(self._phase)
        bodies = {task.kind: getattr(self, task.kind.replace("-", "_")) for task in plan}
        execute(plan, bodies, stop=stack.stop, streams=stack.streams, recorder=stack.recorder)

    def _at(self, task: Task) -> tuple[int, _Layer]:
        assert task.layer is not None
        return task.layer, self.layers[task.layer]

    def _pieces(self, task: Task) -> range:
        return self._stack.cuts.chunks(self._phase)[task.chunk or 0]

    def _chunk(self, task: Task) -> _Chunk:
        assert task.layer is not None
        return _there(self._chunks[task.layer][task.chunk or 0])

    def _hold(self, tensor: Tensor) -> Tensor:
        """A stream must not get memory back while another still reads it."""
        if self._stack.streams is not None:
            self._alive.append(tensor)
        return tensor


class _Forward(_Pass):
    """One forward pass."""

    def __init__(self, stack: Stack, x: Tensor, experts: Sequence[ChunkExperts], keep: bool) -> None:
        self._keep = keep
        self.inputs = stack.cuts.split(x)
        chunks, pieces = len(stack.cuts.forward), len(self.inputs)
        layers = [
            _Layer(stage, of, _leaves(stage, keep), [None] * pieces, [None] * chunks, out=[None] * pieces)
            for stage, of in zip(stack.stages, experts, strict=True)
        ]
        super().__init__(stack, "forward", layers)
        self._chunks = [layer.chunks for layer in layers]
        tokens = x.numel() // x.shape[-1] if x.numel() else 0
        self.capacities = [stage.capacity(tokens) for stage in stack.stages]
        per_sample = tokens // len(x) if len(x) else 0
        self._drawn = [_split_tokens(stage.draw(x), stack.cuts, len(x), per_sample) for stage in stack.stages]

    def run(self) -> tuple[Tensor, list[Tensor]]:
        self._execute()
        last = self.layers[-1]
        z = torch.cat([_piece(last, p).y.detach() + _there(last.out[p]) for p in range(len(self.inputs))])
        return z, [self._whole_gate(layer) for layer in self.layers]

    def attention(self, task: Task) -> None:
        number, layer = self._at(task)
        for p in self._pieces(task):
            if number:
                before = self.layers[number - 1]
                x = _piece(before, p).y.detach() + _there(before.out[p])
            else:
                x = self.inputs[p]
            with torch.set_grad_enabled(self._keep):
                x = x.detach().requires_grad_(self._keep and x.is_floating_point())
                layer.pieces[p] = _Piece(x, *layer.stage.piece(layer.parameters, x, self._drawn[number][p]))
        if not layer.stage.waits:
            self._place(number, self._pieces(task))

    def order(self, task: Task) -> None:
        number, _ = self._at(task)
        self._place(number, range(len(self.inputs)))

    def _place(self, number: int, pieces: range) -> None:
        """Where rows go, and which there is no room for."""
        layer, capacity = self.layers[number], self.capacities[number]
        E = layer.stage.experts_in_all
        found = [_piece(layer, p) for p in pieces]
        chosen = [piece.routing.expert_SK for piece in found]
        if capacity is not None and found:
            expert_SK = torch.cat(chosen)
            if layer.stage.waits:
                dropped_SK = order(expert_SK, E, capacity).row_SK < 0
            else:
                assert pieces.start == layer.placed, "pieces must be routed in order"
                dropped_SK = self._full(layer, expert_SK, capacity)
            chosen = list(torch.where(dropped_SK, -1, expert_SK).split([len(one) for one in chosen]))
        layer.placed = pieces.stop
        for piece, expert_SK in zip(found, chosen, strict=True):
            piece.layout = order(expert_SK, E).exact()
            with torch.set_grad_enabled(self._keep):
                piece.weight_N = take_slots(piece.routing.weight_SK, piece.layout)

    def _full(self, layer: _Layer, expert_SK: Tensor, capacity: int) -> Tensor:
        """Which slots come when their expert is full, where each token has one slot and pieces come in order."""
        E = layer.stage.experts_in_all
        if layer.taken_E is None:
            layer.taken_E = torch.zeros(E, dtype=torch.long, device=expert_SK.device)
        layout = order(expert_SK, E).exact()
        chosen_N = expert_SK.reshape(-1)[layout.slot_N]
        rank_N = torch.arange(layout.rows, device=chosen_N.device) - layout.offsets_E1[:-1].long()[chosen_N]
        full_N = rank_N + layer.taken_E[chosen_N] >= capacity
        layer.taken_E = layer.taken_E + layout.counts_E
        full_S = torch.zeros(expert_SK.numel(), dtype=torch.bool, device=expert_SK.device)
        full_S[layout.slot_N] = full_N
        return full_S.view_as(expert_SK)

    def dispatch(self, task: Task) -> None:
        _, layer = self._at(task)
        pieces = [_piece(layer, p) for p in self._pieces(task)]
        layouts = [_there(piece.layout) for piece in pieces]
        sent = Sent(layouts, self._stack.peers)
        rows = sent.join([permute(piece.u_SM.detach(), layout) for piece, layout in zip(pieces, layouts, strict=True)])
        exchange = layer.stage.exchange(sent.counts, rows, [piece.routing for piece in pieces])
        received = Received(exchange, counts_of(exchange.come_QPE, len(pieces), rows.device))
        chunk = _Chunk(sent, exchange, received, exchange.dispatch(rows))
        weights = sent.join([_there(piece.weight_N).detach() for piece in pieces])
        chunk.weights = exchange.dispatch(weights[:, None])
        layer.chunks[task.chunk or 0] = chunk

    def all_gather(self, task: Task) -> None:
        chunk = self._chunk(task)
        chunk.rows = self._hold(chunk.part.all_gather(self._hold(chunk.rows)))
        chunk.weights = chunk.part.all_gather(_there(chunk.weights))

    def expert(self, task: Task) -> None:
        _, layer = self._at(task)
        chunk = self._chunk(task)
        weight_R = _there(chunk.weights)[:, 0][chunk.received.layout.slot_N]
        chunk.x_RM = chunk.rows
        chunk.rows, chunk.kept = layer.experts.forward(chunk.x_RM, chunk.received.layout, weight_R)
        if not self._keep:
            chunk.x_RM = chunk.kept = None

    def reduce_scatter(self, task: Task) -> None:
        chunk = self._chunk(task)
        chunk.rows = self._hold(chunk.part.reduce_scatter(self._hold(chunk.rows)))

    def combine(self, task: Task) -> None:
        _, layer = self._at(task)
        chunk = self._chunk(task)
        pieces = self._pieces(task)
        for p, rows in zip(pieces, chunk.sent.split(chunk.part.combine(self._hold(chunk.rows))), strict=True):
            piece = _piece(layer, p)
            layer.out[p] = gather_sum(rows, _there(piece.layout)).view(piece.y.shape)
        chunk.rows = chunk.rows[:0]

    def _whole_gate(self, layer: _Layer) -> Tensor:
        """The auxiliary loss of the whole batch, and what its gradient is with respect to each piece's scores."""
        pieces = [_piece(layer, p) for p in range(len(self.inputs))]
        parts = zip(*(piece.scores for piece in pieces), strict=True)
        scores = tuple(torch.cat([score.detach() for score in of]) for of in parts)
        scores = tuple(s.requires_grad_(self._keep) if s.is_floating_point() else s for s in scores)
        with torch.set_grad_enabled(self._keep):
            routing = layer.stage.choose(scores)
        aux = routing.aux_loss
        layer.stage.count(routing, torch.stack([_there(piece.layout).counts_E for piece in pieces]).sum(0))
        if aux.requires_grad:
            leaves = [score for score in scores if score.requires_grad]
            found = iter(torch.autograd.grad(aux, leaves, allow_unused=True))
            sizes = [piece.u_SM.shape[0] for piece in pieces]
            nothing = [None] * len(pieces)
            grads = (next(found) if score.requires_grad else None for score in scores)
            layer.dscores = list(zip(*(nothing if g is None else g.split(sizes) for g in grads), strict=True))
        return aux.detach()

    def finish(self) -> None:
        """What the backward needs of sizes, and nothing that only this pass needed."""
        self._alive.clear()
        for layer in self.layers:
            layer.out = []
            for chunk, pieces in zip(layer.chunks, self._stack.cuts.forward, strict=True):
                exchange = _there(chunk).part
                assert isinstance(exchange, Exchange)
                layer.exchange = exchange
                sizes = (np.split(of, len(pieces), -1) for of in (exchange.send_PE, exchange.come_QPE))
                layer.sizes += zip(*sizes, strict=True)


class _Backward(_Pass):
    """One backward pass."""

    def __init__(self, stack: Stack, layers: list[_Layer], dz: Tensor, daux: Sequence[Tensor | None]) -> None:
        super().__init__(stack, "backward", layers)
        self._daux = daux
        self._dz = stack.cuts.split(dz)  # of each piece, of the layer that is at work
        self.totals: list[Totals] = [None] * len(layers)
        self.dense: list[dict[int, Tensor]] = [{} for _ in layers]
        self._same = stack.cuts.forward == stack.cuts.backward
        self._chunks = [self._prepare(layer) for layer in layers]
        self._drows: list[list[Tensor | None]] = [[None] * len(self._dz) for _ in layers]
        self._dweights: list[list[Tensor | None]] = [[None] * len(self._dz) for _ in layers]

    def _prepare(self, layer: _Layer) -> list[_Chunk | None]:
        if self._same:
            return layer.chunks
        found: list[_Chunk | None] = []
        for pieces in self._stack.cuts.backward:
            send, come = (np.concatenate([layer.sizes[p][i] for p in pieces], -1) for i in (0, 1))
            part = _there(layer.exchange).part(send, come)
            sent = Sent([_there(_piece(layer, p).layout) for p in pieces], self._stack.peers)
            received = Received(part, counts_of(come, len(pieces), sent.counts.device))
            found.append(_Chunk(sent, part, received, torch.empty(0)))
        return found

    def _regroup(self, number: int) -> None:
        """What the forward's chunks kept of a layer goes to the backward's."""
        layer = self.layers[number]
        chunks = [_there(chunk) for chunk in layer.chunks]
        layer.chunks = []
        regrouped = Regrouped([chunk.received for chunk in chunks])
        x_RM, kept_RH = torch.cat([_there(c.x_RM) for c in chunks]), torch.cat([c.kept for c in chunks])
        weights = torch.cat([_there(chunk.weights) for chunk in chunks])
        del chunks
        for chunk, pieces in zip(map(_there, self._chunks[number]), self._stack.cuts.backward, strict=True):
            place, sorted_place = regrouped.places(chunk.received, pieces.start)
            chunk.x_RM, chunk.kept, chunk.weights = x_RM[place], kept_RH[sorted_place], weights[place]

    def run(self) -> Tensor:
        self._execute()
        return torch.cat(self._dz)

    def dispatch(self, task: Task) -> None:
        _, layer = self._at(task)
        chunk = self._chunk(task)
        rows = []
        for p in self._pieces(task):
            piece = _piece(layer, p)
            rows.append(permute(self._dz[p].reshape(piece.u_SM.shape).to(piece.u_SM.dtype), _there(piece.layout)))
        chunk.rows = chunk.part.dispatch(chunk.sent.join(rows))

    def all_gather(self, task: Task) -> None:
        chunk = self._chunk(task)
        chunk.rows = self._hold(chunk.part.all_gather(self._hold(chunk.rows)))

    def expert(self, task: Task) -> None:
        number, layer = self._at(task)
        if layer.chunks and not self._same:
            self._regroup(number)
        chunk = self._chunk(task)
        layout, weights = chunk.received.layout, _there(chunk.weights)
        weight_R = weights[:, 0][layout.slot_N]
        chunk.rows, dweight_R, self.totals[number] = layer.experts.backward(
            self._hold(chunk.rows), _there(chunk.x_RM), chunk.kept, layout, weight_R, self.totals[number]
        )
        chunk.x_RM = chunk.kept = None
        dweight_R = torch.zeros_like(weight_R) if dweight_R is None else dweight_R
        chunk.weights = put_slots(dweight_R.to(weights.dtype), layout)

    def reduce_scatter(self, task: Task) -> None:
        chunk = self._chunk(task)
        chunk.rows = self._hold(chunk.part.reduce_scatter(self._hold(chunk.rows)))
        chunk.weights = chunk.part.reduce_scatter(_there(chunk.weights))

    def combine(self, task: Task) -> None:
        number, _ = self._at(task)
        chunk = self._chunk(task)
        pieces = self._pieces(task)
        rows = chunk.sent.split(chunk.part.combine(self._hold(chunk.rows)))
        weights = chunk.sent.split(chunk.part.combine(_there(chunk.weights))[:, 0])
        for p, drows, dweights in zip(pieces, rows, weights, strict=True):
            self._drows[number][p], self._dweights[number][p] = drows, dweights
        chunk.rows, chunk.weights = chunk.rows[:0], None

    def attention(self, task: Task) -> None:
        number, layer = self._at(task)
        for p in self._pieces(task):
            piece = _piece(layer, p)
            layer.pieces[p] = None
            self._dz[p] = self._through(number, p, piece)
            self._drows[number][p] = self._dweights[number][p] = None

    def _through(self, number: int, p: int, piece: _Piece) -> Tensor:
        """The gradient of a piece's input; what its parameters get is added up."""
        layer = self.layers[number]
        du_SM = gather_sum(_there(self._drows[number][p]), _there(piece.layout))
        pairs = [(piece.y, self._dz[p].reshape(piece.y.shape)), (piece.u_SM, du_SM)]
        pairs.append((_there(piece.weight_N), _there(self._dweights[number][p])))
        daux = self._daux[number]
        if daux is not None and layer.dscores:
            dscores = zip(piece.scores, layer.dscores[p], strict=True)
            pairs += [(score, daux * dscore) for score, dscore in dscores if dscore is not None]
        pairs = [(out, grad) for out, grad in pairs if out.requires_grad]
        wanted = [place for place, one in enumerate(layer.parameters) if one.requires_grad]
        dx, *grads = torch.autograd.grad(
            [out for out, _ in pairs],
            [piece.x, *(layer.parameters[place] for place in wanted)],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        totals = self.dense[number]
        for place, grad in zip(wanted, grads, strict=True):
            if grad is not None:
                totals[place] = grad if place not in totals else totals[place] + grad
        return torch.zeros_like(piece.x) if dx is None else dx


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stack: Stack, experts: Sequence[ChunkExperts], keep: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        run = _Forward(stack, x, experts, keep)
        z, aux = run.run()
        run.finish()
        ctx.stack, ctx.layers = stack, run.layers if keep else None
        ctx.set_materialize_grads(False)
        return (z, *aux)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, *daux: Tensor | None) -> tuple[Tensor | None, ...]:
        layers, ctx.layers = ctx.layers, None
        if layers is None:
            raise RuntimeError("the backward of a pipeline runs once: what it needs is gone; call its forward again")
        if dz is None:
            dz = torch.cat([torch.zeros_like(_piece(layers[-1], p).y) for p in range(len(layers[-1].pieces))])
        run = _Backward(ctx.stack, layers, dz, daux)
        dx = run.run()
        grads: list[Tensor | None] = []
        for layer, totals, dense in zip(layers, run.totals, run.dense, strict=True):
            grads += [dense.get(place) for place in range(len(layer.parameters))]
            own = layer.experts.parameters
            for parameter, total in zip(own, totals or [None] * len(own), strict=True):
                grads.append(None if parameter is None or total is None else total.to(parameter.dtype))
        return dx if ctx.needs_input_grad[0] else None, None, None, None, *grads


def through_stack(x: Tensor, stack: Stack) -> tuple[Tensor, list[Tensor]]:
    """The batch through all layers by the plans of `stack`, and each layer's auxiliary loss. Collective.

    Args:
        x: [B, …, M], B samples.
    Returns:
        [B, …, M], and a scalar for each layer; differentiable once.
    Saves for backward:
        of each layer what autograd keeps of its dense part and gate, received rows, R·M, and what the experts keep, the
        pre-activation R·H (gated 2·R·H); where the two passes have different chunks, the backward copies these once.
    Raises:
        RankError: see `fusedmoe.comm.collectives`.
    """
    experts = [stage.experts(x) for stage in stack.stages]  # once: under autocast their parameters are cast here
    parameters: list[Tensor | None] = []
    for stage, of in zip(stack.stages, experts, strict=True):
        parameters += [*stage.dense_parameters, *of.parameters]
    z, *aux = _Through.apply(x, stack, experts, torch.is_grad_enabled(), *parameters)
    return z, aux


def _leaves(stage: Stage, keep: bool) -> list[Tensor]:
    return [one.detach().requires_grad_(keep and one.requires_grad) for one in stage.dense_parameters]


def _piece(layer: _Layer, p: int) -> _Piece:
    return _there(layer.pieces[p])


def _there(value: Any) -> Any:
    assert value is not None
    return value


def _split_tokens(drawn: tuple[Tensor, ...], cuts: Cuts, samples: int, tokens: int) -> list[tuple[Tensor, ...]]:
    """What belongs to the tokens of each piece, where a sample has so many tokens."""
    shaped = [one.reshape(samples, tokens, *one.shape[1:]) for one in drawn]
    split = [[part.flatten(0, 1) for part in cuts.split(one)] for one in shaped]
    return [tuple(of[p] for of in split) for p in range(len(cuts.shares) - 1)]
