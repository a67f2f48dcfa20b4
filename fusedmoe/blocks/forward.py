"""The forward pass of blocks, task by task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.autograd.parallel import split_counts
from fusedmoe.blocks.cuts import Cuts, Received, Sent, counts_of
from fusedmoe.blocks.deferred import DeferredGradients
from fusedmoe.blocks.state import BlockPass, Cut, Layer, Output, Piece, PieceChunk, Share, Stage, Unit, cuts_of
from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.run import Counts, ForwardPass, Run, present
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task


class BlocksForward(BlockPass, ForwardPass):
    """One forward pass of a batch [B, …, M].

    `keep`: a backward pass will follow.   `refusal`: why there is none, if so: the first exchange tells all ranks.
    """

    def __init__(
        self,
        run: Run,
        cut: Cut,
        stages: Sequence[Stage],
        x: Tensor,
        experts: Sequence[ChunkExperts],
        keep: bool,
        refusal: str | None,
    ) -> None:
        self._stages = stages
        self.keep, self._x, self._lead, self._refusal = keep, x, x.shape[:-1], refusal
        later = Counts(run.plans.backward)
        self._later = [keep and later.of(WEIGHT_GRADIENTS["attention"], n) > 0 for n in range(len(stages))]
        layers = []
        for number, (stage, of) in enumerate(zip(stages, experts, strict=True)):
            unit_cuts, cuts = cuts_of((run.plans.forward, run.plans.backward), number)
            leaves = [one.detach().requires_grad_(keep and one.requires_grad) for one in stage.dense_parameters]
            own = stage.dense_parameters
            units: list[Unit | None] = [None] * len(unit_cuts)
            pieces: list[Piece | None] = [None] * len(cuts)
            layer = Layer(of, stage.hooks, own, leaves, unit_cuts, cuts, units, pieces, held=stage.held)
            layer.returns = stage.returns if keep else None
            layers.append(layer)
        super().__init__(run, cut, layers, x.shape)
        x_SM = x.reshape(self._lead.numel(), x.shape[-1])
        self._wholes = [Share(0, 1, split_counts(len(x_SM), stage.mp), stage.mp.index) for stage in stages]
        self._numbers = torch.arange(len(x_SM)).view(self._lead)
        self._capacities, self._drawn = [], []
        for stage, whole in zip(stages, self._wholes, strict=True):
            own_SM = x_SM[whole.own]
            self._capacities.append(stage.capacity(len(own_SM) if x.numel() else 0))
            self._drawn.append(tuple(self._batch(whole.spread(one)) for one in stage.draw(own_SM)))
        # Of each layer: rows that each expert has been given, and units whose rows have their place.
        self._taken: list[Tensor | None] = [None] * len(layers)
        self._placed = [0] * len(layers)

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """What the last layer gives, and each layer's auxiliary loss."""
        self.execute()
        for layer in self.layers:
            self._note_sizes(layer, layer.chunks)
        aux = [self._whole_gate(number, layer) for number, layer in enumerate(self.layers)]
        z = present(self.layers[-1].z)
        for layer in self.layers:
            layer.z, layer.experts = None, layer.experts.for_backward()
        return z, aux

    def attention(self, task: Task) -> None:
        try:
            self._attention(task)
        except ConfigError as error:
            self._refusal = str(error)

    def _attention(self, task: Task) -> None:
        number, layer = self.at(task)
        units = self.units(task)
        for place in units:
            if self._refusal is not None:
                return
            span = range(place, place + 1)
            before = present(self.layers[number - 1].z) if number else self._x
            # Of `.data`, which counts changes by itself: other parts of the same memory are still being written.
            x = self.view(before.data, layer.unit_cuts, span)
            share = self._share(number, layer.unit_cuts, place)
            drawn = tuple(self._tokens(one, layer.unit_cuts, span)[share.own] for one in self._drawn[number])
            past: list[tuple[Tensor, ...]] = []
            with torch.set_grad_enabled(self.keep):
                x = x.detach().requires_grad_(self.keep and x.is_floating_point())
                if self.cut.in_order:
                    earlier = (present(layer.units[other]).own for other in range(place))
                    past = [tuple(one.detach().requires_grad_(one.requires_grad) for one in own) for own in earlier]
                later = DeferredGradients(layer.parameters) if self._later[number] else None
                samples = self.cut.samples(x)
                found = self._stages[number].dense(layer.parameters, samples, share, drawn, past, later)
                y, u, shared = (None if one is None else one.view(x.shape) for one in found[:3])
            assert y is not None and u is not None
            if layer.z is None:
                layer.z = y.new_empty(self.shape, dtype=torch.promote_types(y.dtype, u.dtype))
            self.view(layer.z, layer.unit_cuts, span).copy_(y.detach())
            to = Output.of(y), Output.of(u), None if shared is None else Output.of(shared)
            shared = None if shared is None else shared.detach()
            down: list[Tensor | None] = [None] * len(found.own)
            u = u if self._stages[number].orders else u.detach()
            layer.units[place] = Unit(
                x, u, shared, to, share, found.scores, found.routing, found.own, past, later, down=down
            )
        if not (self._stages[number].waits and self.counts.of("permute", number)):
            self._place(number, units)

    def permute(self, task: Task) -> None:
        number, layer = self.at(task)
        if self._stages[number].waits and self._refusal is None:
            self._place(number, range(len(layer.units)))

    def _place(self, number: int, units: range) -> None:
        """Where rows go, and which there is no room for."""
        layer, capacity, E = self.layers[number], self._capacities[number], self._stages[number].experts_in_all
        assert units.start == self._placed[number], "units must be routed in order"
        self._placed[number] = units.stop
        found = [present(layer.units[place]) for place in units]
        chosen = [self._batch(unit.share.spread(unit.routing.expert_SK, -1), unit.x) for unit in found]
        if capacity is not None:
            axis = self.axis
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
                expert_SK = expert[at].flatten(0, -2)
                with torch.set_grad_enabled(self.keep):
                    weight_SK = self._batch(unit.share.spread(unit.routing.weight_SK), unit.x)[at].flatten(0, -2)
                    if self._stages[number].orders:
                        u_SM = present(unit.u)[at].flatten(0, -2)
                        ordered = self._stages[number].order(u_SM, expert_SK, weight_SK)
                        layout, weighs_SK = ordered.layout.exact(), ordered.weight_SK
                        ones_N = weight_SK.new_ones(layout.rows)
                        weight_N = ones_N if weighs_SK is None else take_pairs(weighs_SK, layout)
                        layer.pieces[p] = Piece(layout, weight_N, ordered.kept_E, ordered)
                    else:
                        layout = order(expert_SK, E).exact()
                        layer.pieces[p] = Piece(layout, take_pairs(weight_SK, layout), layout.counts_E)

    def _full(self, number: int, expert_SK: Tensor, capacity: int) -> Tensor:
        """Which slots come when their expert is full, where each token has one slot and units come in order."""
        E = self._stages[number].experts_in_all
        taken_E = self._taken[number]
        if taken_E is None:
            taken_E = torch.zeros(E, dtype=torch.long, device=expert_SK.device)
        layout = order(expert_SK, E).exact()
        chosen_N = expert_SK.reshape(-1)[layout.pair_N]
        rank_N = torch.arange(layout.rows, device=chosen_N.device) - layout.offsets_E1[:-1].long()[chosen_N]
        full_N = rank_N + taken_E[chosen_N] >= capacity
        self._taken[number] = taken_E + layout.counts_E
        full_S = torch.zeros(expert_SK.numel(), dtype=torch.bool, device=expert_SK.device)
        full_S[layout.pair_N] = full_N
        return full_S.view_as(expert_SK)

    def sparse_all_gather(self, task: Task) -> None:
        self._stages[self.number(task)].gather()

    def start(self, task: Task) -> None:
        number, layer = self.at(task)
        places = self.pieces(task)
        if (refusal := self._refusal) is None:
            pieces = [present(layer.pieces[p]) for p in places]
        else:  # this rank sends nothing but why
            none_SK = torch.empty(0, 1, dtype=torch.long, device=self._x.device)
            none = order(none_SK, self._stages[number].experts_in_all)
            pieces = [Piece(none.exact(), self._x.new_empty(0), none.counts_E) for _ in places]
        if layer.held is not None:
            for piece in pieces:
                self._to_places(number, piece)
        sent = Sent([piece.layout for piece in pieces], self.peers)
        if refusal is not None:
            self._stages[number].exchange(sent.counts, self._x, (), refusal)
        rows = sent.join([self._rows(layer, p, piece) for p, piece in zip(places, pieces, strict=True)])
        routings = [present(layer.units[at]).routing for at in sorted({layer.unit_of(p) for p in places})]
        exchange = self._stages[number].exchange(sent.counts, rows, routings, None)
        received = Received(exchange, counts_of(exchange.come_QPE, len(pieces), layer.held, rows.device))
        weights = sent.join([self.use(piece.weight_N.detach()) for piece in pieces])
        chunk = PieceChunk(exchange, received.layout, rows, weights[:, None], sent=sent, received=received)
        self.chunks[number][task.chunk or 0] = layer.chunks[task.chunk or 0] = chunk

    def _to_places(self, number: int, piece: Piece) -> None:
        """Rows that are sorted by expert go to copies of these."""
        by_expert = piece.layout
        piece.layout = self._stages[number].places(by_expert)
        with torch.set_grad_enabled(self.keep):
            piece.weight_N = piece.weight_N[by_expert.row_SK.reshape(-1)[piece.layout.pair_N]]

    def finish(self, task: Task, rows: Tensor) -> None:
        number, layer = self.at(task)
        parts = present(self.piece_chunk(task).sent).split(rows)
        for p, part in zip(self.pieces(task), parts, strict=True):
            z = self.view(present(layer.z), layer.cuts, range(p, p + 1))
            y_SM = gather_sum(part, present(layer.pieces[p]).layout)
            z += self._end(number, p, y_SM, z.shape) if self._stages[number].ends else y_SM.view(z.shape)

    def _end(self, number: int, p: int, rows_SM: Tensor, shape: torch.Size) -> Tensor:
        """What a layer gives of a piece, and the graph that made it."""
        layer, stage = self.layers[number], self._stages[number]
        unit, piece = present(layer.units[layer.unit_of(p)]), present(layer.pieces[p])
        with torch.set_grad_enabled(self.keep):
            rows_SM.requires_grad_(self.keep)
            y = (rows_SM if piece.ordered is None else stage.restore(rows_SM, piece.ordered)).view(shape)
            if unit.shared is not None:
                y = y + self.use(unit.shared)[self.in_unit(layer, p)]
            z = stage.end(self.cut.samples(y), self._share(number, layer.cuts, p)).view(shape)
        piece.ended = Output.of(z), y, rows_SM
        return z.detach()

    def _share(self, number: int, cuts: Cuts, place: int) -> Share:
        """Of a unit or a piece."""
        whole = self._wholes[number]
        part_S = self.view(self._numbers, cuts, range(place, place + 1)).flatten().contiguous()
        ends = torch.tensor([0, *whole.rows]).cumsum(0)
        rows = torch.searchsorted(part_S, ends).diff()
        return Share(place, len(cuts), rows.tolist(), whole.rank)

    def _whole_gate(self, number: int, layer: Layer) -> Tensor:
        """The auxiliary loss of the whole batch, and what its gradient is with respect to the scores."""
        units, axis, whole = [present(unit) for unit in layer.units], self.axis, self._wholes[number]
        parts = zip(
            *([self._batch(unit.share.spread(one.detach()), unit.x) for one in unit.scores] for unit in units),
            strict=True,
        )
        scores = [torch.cat(of, axis).flatten(0, len(self._lead) - 1)[whole.own] for of in parts]
        scores = [one.requires_grad_(self.keep) if one.is_floating_point() else one for one in scores]
        with torch.set_grad_enabled(self.keep):
            routing = self._stages[number].choose(tuple(scores))
        aux = routing.aux_loss
        self._stages[number].count(routing, torch.stack([present(piece).kept_E for piece in layer.pieces]).sum(0))
        if aux.requires_grad:
            leaves = [one for one in scores if one.requires_grad]
            found = iter(torch.autograd.grad(aux, leaves, allow_unused=True))
            grads = [next(found) if one.requires_grad else None for one in scores]
            layer.dscores = [None if grad is None else self._batch(whole.spread(grad)) for grad in grads]
        return aux.detach()

    def _note_sizes(self, layer: Layer, chunks: dict[int, PieceChunk]) -> None:
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
        unit = present(layer.units[place])
        u = present(unit.u)
        if piece.ordered is None:
            u_SM = u[self.in_unit(layer, p)].reshape(-1, u.shape[-1])
        else:
            u_SM = piece.ordered.x_SM.detach()
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
