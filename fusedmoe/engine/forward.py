"""The forward pass of a stack, task by task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fusedmoe.autograd.linear_later import Later
from fusedmoe.autograd.order import order, take_slots
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.chunks import Cuts, Received, Sent, counts_of
from fusedmoe.engine.state import Chunk, Counts, Layer, Output, Pass, Piece, Stack, Stage, Unit, cuts_of, there
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task


class Forward(Pass):
    """One forward pass of a batch [B, …, M]. `keep`: a backward pass will follow."""

    def __init__(
        self, stack: Stack, stages: Sequence[Stage], x: Tensor, experts: Sequence[ChunkExperts], keep: bool
    ) -> None:
        self._stages = stages
        self._keep, self._x, self._lead = keep, x, x.shape[:-1]
        later = Counts(stack.plans.backward)
        self._later = [keep and later.of(WEIGHT_GRADIENTS["attention"], n) > 0 for n in range(len(stages))]
        layers = []
        for number, (stage, of) in enumerate(zip(stages, experts, strict=True)):
            unit_cuts, cuts = cuts_of((stack.plans.forward, stack.plans.backward), number)
            leaves = [one.detach().requires_grad_(keep and one.requires_grad) for one in stage.dense_parameters]
            own = stage.dense_parameters
            layers.append(Layer(of, own, leaves, unit_cuts, cuts, [None] * len(unit_cuts), [None] * len(cuts)))
        super().__init__(stack, "forward", layers, x.shape)
        tokens = self._lead.numel() if x.numel() else 0
        self._capacities = [stage.capacity(tokens) for stage in stages]
        self._drawn = [tuple(self._batch(one) for one in stage.draw(x)) for stage in stages]
        # Of each layer: rows that each expert has been given, and units whose rows have their place.
        self._taken: list[Tensor | None] = [None] * len(layers)
        self._placed = [0] * len(layers)
        self.chunks = [layer.chunks for layer in layers]

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """What the last layer gives, and each layer's auxiliary loss."""
        self.execute()
        for layer, chunks in zip(self.layers, self.chunks, strict=True):
            self._note_sizes(layer, chunks)
        aux = [self._whole_gate(number, layer) for number, layer in enumerate(self.layers)]
        z = there(self.layers[-1].z)
        for layer in self.layers:
            layer.z, layer.experts = None, layer.experts.for_backward()
        return z, aux

    def attention(self, task: Task) -> None:
        number, layer = self.at(task)
        units = self.units(task)
        for place in units:
            span = range(place, place + 1)
            before = there(self.layers[number - 1].z) if number else self._x
            # Of `.data`, which counts changes by itself: other parts of the same memory are still being written.
            x = self.view(before.data, layer.unit_cuts, span)
            drawn = tuple(self._tokens(one, layer.unit_cuts, span) for one in self._drawn[number])
            past: list[tuple[Tensor, ...]] = []
            with torch.set_grad_enabled(self._keep):
                x = x.detach().requires_grad_(self._keep and x.is_floating_point())
                if self.stack.axis == 1:
                    earlier = (there(layer.units[other]).own for other in range(place))
                    past = [tuple(one.detach().requires_grad_(one.requires_grad) for one in own) for own in earlier]
                later = Later(layer.parameters) if self._later[number] else None
                y, u, scores, routing, own = self._stages[number].dense(layer.parameters, x, drawn, past, later)
            if layer.z is None:
                layer.z = y.new_empty(self.shape, dtype=torch.promote_types(y.dtype, u.dtype))
            self.view(layer.z, layer.unit_cuts, span).copy_(y.detach())
            to = Output.of(y), Output.of(u)
            down: list[Tensor | None] = [None] * len(own)
            layer.units[place] = Unit(x, u.detach(), to, scores, routing, own, past, later, down=down)
        if not (self._stages[number].waits and self.counts.of("order", number)):
            self._place(number, units)

    def order(self, task: Task) -> None:
        number, layer = self.at(task)
        if self._stages[number].waits:
            self._place(number, range(len(layer.units)))

    def _place(self, number: int, units: range) -> None:
        """Where rows go, and which there is no room for."""
        layer, capacity, E = self.layers[number], self._capacities[number], self._stages[number].experts_in_all
        assert units.start == self._placed[number], "units must be routed in order"
        self._placed[number] = units.stop
        found = [there(layer.units[place]) for place in units]
        chosen = [self._batch(unit.routing.expert_SK, unit.x) for unit in found]
        if capacity is not None:
            axis = self.stack.axis
            together = torch.cat(chosen, axis)
            expert_SK = together.flatten(0, -2)
            if len(units) == len(layer.units):
                dropped_SK = order(expert_SK, E, capacity).row_SK < 0
            else:
                dropped_SK = self._full(number, expert_SK, capacity)
            kept = torch.where(dropped_SK, -1, expert_SK).view_as(together)
            chosen = list(kept.split([one.shape[axis] for one in chosen], axis))
        for place, unit, expert in zip(units, found, chosen, strict=True):
            for p in layer.cuts.inside(layer.unit_cuts, place):
                at = self.in_unit(layer, p)
                layout = order(expert[at].flatten(0, -2), E).exact()
                with torch.set_grad_enabled(self._keep):
                    weight = self._batch(unit.routing.weight_SK, unit.x)[at].flatten(0, -2)
                    layer.pieces[p] = Piece(layout, take_slots(weight, layout))

    def _full(self, number: int, expert_SK: Tensor, capacity: int) -> Tensor:
        """Which slots come when their expert is full, where each token has one slot and units come in order."""
        E = self._stages[number].experts_in_all
        taken_E = self._taken[number]
        if taken_E is None:
            taken_E = torch.zeros(E, dtype=torch.long, device=expert_SK.device)
        layout = order(expert_SK, E).exact()
        chosen_N = expert_SK.reshape(-1)[layout.slot_N]
        rank_N = torch.arange(layout.rows, device=chosen_N.device) - layout.offsets_E1[:-1].long()[chosen_N]
        full_N = rank_N + taken_E[chosen_N] >= capacity
        self._taken[number] = taken_E + layout.counts_E
        full_S = torch.zeros(expert_SK.numel(), dtype=torch.bool, device=expert_SK.device)
        full_S[layout.slot_N] = full_N
        return full_S.view_as(expert_SK)

    def dispatch(self, task: Task) -> None:
        number, layer = self.at(task)
        places = self.pieces(task)
        pieces = [there(layer.pieces[p]) for p in places]
        sent = Sent([piece.layout for piece in pieces], self.stack.peers)
        rows = sent.join([self._rows(layer, p, piece) for p, piece in zip(places, pieces, strict=True)])
        units = sorted({layer.unit_of(p) for p in places})
        exchange = self._stages[number].exchange(
            sent.counts, rows, [there(layer.units[place]).routing for place in units]
        )
        received = Received(exchange, counts_of(exchange.come_QPE, len(pieces), rows.device))
        chunk = Chunk(sent, exchange, received, exchange.dispatch(rows))
        weights = sent.join([self.use(piece.weight_N.detach()) for piece in pieces])
        chunk.weights = exchange.dispatch(weights[:, None])
        self.chunks[number][task.chunk or 0] = chunk

    def all_gather(self, task: Task) -> None:
        chunk = self.chunk(task)
        chunk.rows = chunk.part.all_gather(self.use(there(chunk.rows)))
        chunk.weights = chunk.part.all_gather(self.use(there(chunk.weights)))

    def expert(self, task: Task) -> None:
        _, layer = self.at(task)
        chunk = self.chunk(task)
        weight_R = self.use(there(chunk.weights))[:, 0][chunk.received.layout.slot_N]
        chunk.x_RM = self.use(there(chunk.rows))
        chunk.rows, chunk.kept = layer.experts.forward(chunk.x_RM, chunk.received.layout, weight_R)
        if not self._keep:
            chunk.x_RM = chunk.kept = None

    def reduce_scatter(self, task: Task) -> None:
        chunk = self.chunk(task)
        chunk.rows = chunk.part.reduce_scatter(self.use(there(chunk.rows)))

    def combine(self, task: Task) -> None:
        _, layer = self.at(task)
        chunk, places = self.chunk(task), self.pieces(task)
        for p, rows in zip(places, chunk.sent.split(chunk.part.combine(self.use(there(chunk.rows)))), strict=True):
            z = self.view(there(layer.z), layer.cuts, range(p, p + 1))
            z += gather_sum(rows, there(layer.pieces[p]).layout).view(z.shape)
        chunk.rows = None

    def _whole_gate(self, number: int, layer: Layer) -> Tensor:
        """The auxiliary loss of the whole batch, and what its gradient is with respect to the scores."""
        units, axis = [there(unit) for unit in layer.units], self.stack.axis
        parts = zip(*([self._batch(one.detach(), unit.x) for one in unit.scores] for unit in units), strict=True)
        scores = [torch.cat(of, axis).flatten(0, len(self._lead) - 1) for of in parts]
        scores = [one.requires_grad_(self._keep) if one.is_floating_point() else one for one in scores]
        with torch.set_grad_enabled(self._keep):
            routing = self._stages[number].choose(tuple(scores))
        aux = routing.aux_loss
        self._stages[number].count(
            routing, torch.stack([there(piece).layout.counts_E for piece in layer.pieces]).sum(0)
        )
        if aux.requires_grad:
            leaves = [one for one in scores if one.requires_grad]
            found = iter(torch.autograd.grad(aux, leaves, allow_unused=True))
            grads = [next(found) if one.requires_grad else None for one in scores]
            layer.dscores = [None if grad is None else self._batch(grad) for grad in grads]
        return aux.detach()

    def _note_sizes(self, layer: Layer, chunks: dict[int, Chunk]) -> None:
        """What the backward pass needs of sizes."""
        for number, chunk in chunks.items():
            assert isinstance(chunk.part, Exchange)
            layer.exchange = chunk.part
            pieces = layer.cuts.chunk(number, len(chunks), "forward")
            sizes = (np.split(of, len(pieces), -1) for of in (chunk.part.send_PE, chunk.part.come_QPE))
            layer.sizes |= dict(zip(pieces, zip(*sizes, strict=True), strict=True))

    def _rows(self, layer: Layer, p: int, piece: Piece) -> Tensor:
        """A piece's rows as they are sent. A unit's input of the experts goes when the last of them has been made."""
        place = layer.unit_of(p)
        unit = there(layer.units[place])
        u = there(unit.u)
        u_SM = u[self.in_unit(layer, p)].reshape(-1, u.shape[-1])
        unit.dispatched += 1
        if unit.dispatched == len(layer.cuts.inside(layer.unit_cuts, place)):
            unit.u = None
        return permute(self.use(u_SM), piece.layout)

    def _batch(self, value_S: Tensor, like: Tensor | None = None) -> Tensor:
        """[S, …] values of tokens -> [B, …, ·], of the whole batch or of a unit's x."""
        lead = self._lead if like is None else like.shape[:-1]
        return value_S.view(*lead, *value_S.shape[1:])

    def _tokens(self, value: Tensor, cuts: Cuts, pieces: range) -> Tensor:
        """The inverse, of some pieces."""
        return self.view(value, cuts, pieces).flatten(0, len(self._lead) - 1)
