"""The backward pass of blocks, task by task, from what the forward pass stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedmoe.blocks.cuts import Received, Regrouped, Sent, counts_of
from fusedmoe.blocks.state import BlockPass, Cut, Layer, Output, Piece, PieceChunk, Unit
from fusedmoe.engine.chunks import Kept
from fusedmoe.engine.run import BackwardPass, Chunk, Run, present
from fusedmoe.kernels.gather_sum import gather_sum, permute, put_pairs
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task


class BlocksBackward(BlockPass, BackwardPass):
    """One backward pass.

    Attributes:
        dense: of each layer, gradients of the dense parts' parameters by place.
    """

    def __init__(self, run: Run, cut: Cut, layers: list[Layer], dz: Tensor, daux: Sequence[Tensor | None]) -> None:
        super().__init__(run, cut, layers, dz.shape)
        self._daux = daux
        # Of what each layer gives; last, since it is also the first layer's that is -1, of the input.
        self._dz: list[Tensor | None] = [None] * (len(layers) + 1)
        self._dz[len(layers) - 1] = dz
        self._done = [0] * len(layers)  # units whose dense part is done
        self.dense: list[dict[int, Tensor]] = [{} for _ in layers]
        kinds = ("attention", WEIGHT_GRADIENTS["attention"])
        self._left = [sum(self.counts.of(kind, number) for kind in kinds) for number in range(len(layers))]
        self._same = []
        for number, layer in enumerate(layers):
            for chunk in layer.chunks.values():
                chunk.part.turn()
            rows = self.counts.rows(number)
            self._same.append(rows == len(layer.chunks))
            # The first chunk here is the last one there.
            there_too = dict(enumerate(reversed([layer.chunks[i] for i in range(len(layer.chunks))])))
            self.chunks[number] = {**(there_too if self._same[-1] else self._regrouped_chunks(layer, rows))}

    def run(self) -> Tensor:
        """The gradient of the input."""
        self.execute()
        return present(self._dz[-1])

    def _regrouped_chunks(self, layer: Layer, count: int) -> dict[int, PieceChunk]:
        """Other chunks of the same pieces, as yet without rows."""
        found = {}
        for number in range(count):
            places = layer.cuts.chunk(number, count, "backward")
            send, come = (np.concatenate([layer.sizes[p][i] for p in places], -1) for i in (0, 1))
            part = present(layer.exchange).part(send, come)
            sent = Sent([present(layer.pieces[p]).layout for p in places], self.peers)
            received = Received(part, counts_of(come, len(places), layer.held, sent.counts.device))
            found[number] = PieceChunk(part, received.layout, sent=sent, received=received)
        return found

    def _regroup(self, number: int) -> None:
        """What the forward's chunks kept of a layer goes to the backward's."""
        layer = self.layers[number]
        chunks = [layer.chunks[i] for i in range(len(layer.chunks))]
        layer.chunks = {}
        regrouped = Regrouped([present(chunk.received) for chunk in chunks])
        x_RM, kept_RH = Kept([present(c.x_RM) for c in chunks]), Kept([c.kept for c in chunks])
        weights = torch.cat([present(chunk.weights) for chunk in chunks])
        del chunks
        for place, chunk in self.chunks[number].items():
            assert isinstance(chunk, PieceChunk)
            pieces = layer.cuts.chunk(place, len(self.chunks[number]), "backward")
            rows, sorted_rows = regrouped.places(present(chunk.received), pieces.start)
            chunk.x_RM, chunk.kept, chunk.weights = x_RM.rows(rows), kept_RH.rows(sorted_rows), weights[rows]

    def start(self, task: Task) -> None:
        number, layer = self.at(task)
        dz, rows = present(self._dz[number]), []
        for p in self.pieces(task):
            piece, to_u = present(layer.pieces[p]), present(layer.units[layer.unit_of(p)]).to[1]
            dy = self.use(self.view(dz, layer.cuts, range(p, p + 1)))
            if piece.ended is not None:
                dy = self._through_end(piece, dy)
            rows.append(permute(dy.reshape(-1, dz.shape[-1]).to(to_u.dtype), piece.layout))
        chunk = self.piece_chunk(task)
        chunk.rows = present(chunk.sent).join(rows)

    def _through_end(self, piece: Piece, dz: Tensor) -> Tensor:
        """The gradient of experts' results."""
        (to_z, y, rows_SM), piece.ended = present(piece.ended), None
        if to_z.edge is None:
            piece.dy = torch.zeros_like(y)
            return torch.zeros_like(rows_SM)
        wanted, matrix = [rows_SM, y], None if piece.ordered is None else piece.ordered.combine_SN
        if matrix is not None and matrix.requires_grad:
            wanted.append(matrix)
        drows_SM, piece.dy, *rest = torch.autograd.grad(to_z.edge, wanted, dz.to(to_z.dtype).reshape(to_z.shape))
        piece.dcombine = rest[0] if rest else None
        return drows_SM

    def sparse_reduce_scatter(self, task: Task) -> None:
        number, layer = self.at(task)
        if layer.returns is not None:
            layer.returns(self.totals[number])

    def recall(self, task: Task) -> None:
        number, layer = self.at(task)
        if layer.chunks and not self._same[number]:
            self._regroup(number)

    def give_weights(self, chunk: Chunk, dweight_R: Tensor | None) -> None:
        weights, rows = present(chunk.weights), chunk.layout.pair_N
        dweight_R = weights.new_zeros(len(rows)) if dweight_R is None else dweight_R
        chunk.weights = put_pairs(dweight_R.to(weights.dtype), chunk.layout)

    def finish(self, task: Task, rows: Tensor) -> None:
        _, layer = self.at(task)
        chunk = self.piece_chunk(task)
        weights, chunk.weights = present(chunk.weights)[:, 0], None
        sent = present(chunk.sent)
        for p, drows, dweight in zip(self.pieces(task), sent.split(rows), sent.split(weights), strict=True):
            piece = present(layer.pieces[p])
            piece.drows, piece.dweight = drows, dweight

    def attention(self, task: Task) -> None:
        number, layer = self.at(task)
        for place in reversed(self.units(task)):
            unit = present(layer.units[place])
            dx = self._through(number, place, unit)
            if self._dz[number - 1] is None:
                self._dz[number - 1] = dx.new_empty(self.shape)
            self.view(present(self._dz[number - 1]), layer.unit_cuts, range(place, place + 1)).copy_(dx)
            if unit.later is None:
                layer.units[place] = None
            for p in layer.cuts.inside(layer.unit_cuts, place):
                layer.pieces[p] = None
            self._done[number] += 1
        if self._done[number] == len(layer.units):
            self._dz[number] = None
        self._end_part(number)

    def attention_weight_gradient(self, task: Task) -> None:
        number, layer = self.at(task)
        for place in reversed(self.units(task)):
            present(present(layer.units[place]).later).run(lambda at, gradient: self._add(number, at, gradient))
            layer.units[place] = None
        self._end_part(number)

    def _through(self, number: int, place: int, unit: Unit) -> Tensor:
        """The gradient of a unit's input; what its parameters get is added up."""
        layer = self.layers[number]
        to_y, to_u, to_shared = unit.to
        span = range(place, place + 1)
        pairs: list[tuple[Any, Tensor]] = []

        def give(to: Output, gradient: Tensor) -> None:
            if to.edge is not None:
                pairs.append((to.edge, gradient.to(to.dtype).reshape(to.shape)))

        give(to_y, self.view(present(self._dz[number]), layer.unit_cuts, span))
        pieces = [present(layer.pieces[p]) for p in layer.cuts.inside(layer.unit_cuts, place)]
        drows = [gather_sum(self.use(present(piece.drows)), piece.layout) for piece in pieces]
        if pieces[0].ordered is None:
            give(to_u, self._of_unit(layer, place, to_u.shape, drows))
        for piece, dx_SM in zip(pieces, drows, strict=True):
            if piece.ordered is not None and piece.ordered.x_SM.requires_grad:
                pairs.append((piece.ordered.x_SM, dx_SM))
            if piece.ordered is not None and piece.dcombine is not None:
                pairs.append((piece.ordered.combine_SN, self.use(piece.dcombine)))
        if to_shared is not None:
            give(to_shared, self._of_unit(layer, place, to_shared.shape, [self.use(present(one.dy)) for one in pieces]))
        for piece in pieces:
            if piece.weight_N.requires_grad:
                pairs.append((piece.weight_N, self.use(present(piece.dweight))))
        daux = self._daux[number]
        if daux is not None and layer.dscores is not None:
            for score, dscore in zip(unit.scores, layer.dscores, strict=True):
                if dscore is not None and score.requires_grad:
                    own = self.view(dscore, layer.unit_cuts, span).flatten(0, len(self.shape) - 2)[unit.share.own]
                    pairs.append((score, daux * own))
        for own, down in zip(unit.own, unit.down, strict=True):
            if down is not None and own.requires_grad:
                pairs.append((own, down))
        wanted = [at for at, one in enumerate(layer.parameters) if one.requires_grad]
        past = [(other, at) for other, of in enumerate(unit.past) for at, one in enumerate(of) if one.requires_grad]
        dx, *grads = torch.autograd.grad(
            [to for to, _ in pairs],
            [unit.x, *(layer.parameters[at] for at in wanted), *(unit.past[other][at] for other, at in past)],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        for at, grad in zip(wanted, grads, strict=False):
            if grad is not None:
                self._add(number, at, grad)
        for (other, at), grad in zip(past, grads[len(wanted) :], strict=True):
            earlier = present(layer.units[other])
            if grad is not None:
                before = earlier.down[at]
                earlier.down[at] = grad if before is None else before + grad
        return torch.zeros_like(unit.x) if dx is None else dx

    def _of_unit(self, layer: Layer, place: int, shape: torch.Size, parts: Sequence[Tensor]) -> Tensor:
        """Values of a unit's pieces together."""
        if len(parts) == 1:
            return parts[0]
        whole = parts[0].new_empty(shape)
        for p, part in zip(layer.cuts.inside(layer.unit_cuts, place), parts, strict=True):
            at = self.in_unit(layer, p)
            whole[at] = part.view(whole[at].shape)
        return whole

    def _add(self, number: int, place: int, gradient: Tensor) -> None:
        totals = self.dense[number]
        # Under autocast what comes later is in half precision; units are not rounded one after the other.
        gradient = gradient.to(self.layers[number].parameters[place].dtype)
        totals[place] = gradient if place not in totals else totals[place] + gradient

    def _end_part(self, number: int) -> None:
        """After the last task of a layer's dense part its gradients are whole, and may be reduced."""
        self._left[number] -= 1
        gradients = self.settings.gradients
        if self._left[number] or gradients is None or not gradients.opened:
            return
        own = self.layers[number].own
        for place, gradient in self.dense[number].items():
            # In memory of its own, since it is reduced in place; and with what passes before this one have added up.
            parameter = own[place]
            if parameter.grad is None:
                whole = gradient.clone(memory_format=torch.contiguous_format)
            else:
                whole, parameter.grad = gradient + parameter.grad, None
            self.dense[number][place] = whole
            gradients.give(parameter, whole)
