"""A layer by itself: dispatch, experts and combine of tokens that are routed already, in chunks and by plans.

A chunk has its share of every expert's rows (see `engine/chunks.py`), so each row meets the same experts and is added
up in the same order whatever the plan. The backward is written out, from what the forward stored: received rows and
pre-activations of each chunk. Router weights cross in one message of their own before the first chunk, their gradients
in one after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.moves import received_layout
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.chunks import Kept, chunk_order, concatenated, in_chunks, inverse
from fusedmoe.engine.run import BackwardPass, Chunk, ForwardPass, Pass, Run, present
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.gather_sum import gather_sum, permute, put_pairs
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.task import Task


class RowChunks:
    """The rows of a call in chunks: what this rank sends, and what it receives."""

    def __init__(self, exchange: Exchange, layout: Layout, degree: int) -> None:
        self.parts: list[Part] = exchange.parts(degree)
        segments_G = exchange.counts_RE.reshape(-1)
        #: For each row received, in chunk order, its number without chunks.
        self.order_R: Tensor | None = None
        #: The rows sent, in chunk order.
        self.layout = layout
        if degree > 1:
            self.order_R = chunk_order(segments_G, exchange.rows, degree)
            self.layout = in_chunks(layout, chunk_order(layout.counts_E, layout.rows, degree))
        #: Each chunk's received rows sorted by local expert.
        self.received = [received_layout(part.counts_RE, part.rows) for part in self.parts]
        sizes = [part.rows for part in self.parts]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def split(self, value_R: Tensor) -> list[Tensor]:
        """Values of received rows, numbered without chunks -> those of each chunk, sorted by expert."""
        in_order = value_R if self.order_R is None else value_R[self.order_R]
        parts = in_order.split([part.rows for part in self.parts])
        return [value[layout.pair_N] for value, layout in zip(parts, self.received, strict=True)]

    def join(self, value_parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        pairs = zip(value_parts, self.received, strict=True)
        in_order = torch.cat([put_pairs(value, layout)[:, 0] for value, layout in pairs])
        if self.order_R is None:
            return in_order
        return torch.empty_like(in_order).index_put_((self.order_R,), in_order)

    def rows_of(self, others: RowChunks) -> list[tuple[Tensor, Tensor]]:
        """For each chunk here, where its received rows are among all of `others`, as received and as sorted."""
        number_R = inverse(others.numbers())
        pairs = zip(others.starts, others.received, strict=True)
        sorted_R = torch.cat([start + layout.row_SK[:, 0] for start, layout in pairs])
        found = []
        for mine, layout in zip(self.numbers().split([part.rows for part in self.parts]), self.received, strict=True):
            received = number_R[mine]
            found.append((received, sorted_R[received[layout.pair_N]]))
        return found

    def numbers(self) -> Tensor:
        """[R]: of each row received, in chunk order, the number without chunks."""
        if self.order_R is None:
            return torch.arange(sum(part.rows for part in self.parts), device=self.received[0].pair_N.device)
        return self.order_R


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The rows of a call.

    Attributes:
        layout: of the rows that travel: tokens sorted by expert, without slack.
        exchange: made of that layout's counts.
        experts: the local ones.
    """

    layout: Layout
    exchange: Exchange
    experts: ChunkExperts
    run: Run

    @cached_property
    def forward_chunks(self) -> RowChunks:
        return RowChunks(self.exchange, self.layout, self.run.degree("forward"))

    @cached_property
    def backward_chunks(self) -> RowChunks:
        degree = self.run.degree("backward")
        same = degree == self.run.degree("forward")
        return self.forward_chunks if same else RowChunks(self.exchange, self.layout, degree)


class _OfTokens(Pass):
    """Rows that are all there from the beginning.

    Args:
        weights: of each chunk's sorted rows.
    """

    def __init__(self, batch: RowBatch, chunks: RowChunks, rows_NM: Tensor, weights: Sequence[Tensor | None]) -> None:
        super().__init__(batch.run, [batch.experts])
        places = zip(chunks.parts, chunks.received, weights, strict=True)
        self.chunks[0] = {
            i: Chunk(part, layout, weight_R=weight_R) for i, (part, layout, weight_R) in enumerate(places)
        }
        self._rows: list[Tensor | None] = [*rows_NM.split([part.sent for part in chunks.parts])]
        # A stream must not get memory back for new tensors while another still reads it: all tensors that go from one
        # to another live until the streams have met again, at the end of `execute`.
        self._alive: list[Tensor] = []

    def number(self, task: Task) -> int:
        return 0

    def start(self, task: Task) -> None:
        at = task.chunk or 0
        self.chunk(task).rows, self._rows[at] = self._rows[at], None

    def finish(self, task: Task, rows: Tensor) -> None:
        self._rows[task.chunk or 0] = rows

    def use(self, tensor: Tensor) -> Tensor:
        if self.settings.streams is not None:
            self._alive.append(tensor)
        return tensor

    def run(self) -> Tensor:
        """What comes of the rows, in chunk order."""
        if self.settings.copies is not None:
            self.settings.copies.wait()
        if self.settings.gradients is not None:
            self.settings.gradients.wait()
        self.execute()
        rows = [present(one) for one in self._rows]
        self._rows.clear()
        return concatenated(rows)


class _Forward(_OfTokens, ForwardPass):
    """Keeps what experts were given and what they keep."""


class _Backward(_OfTokens, BackwardPass):
    """From what the forward pass has kept of its chunks, which may be others.

    Args:
        x, kept: of each chunk in the forward pass.
        places: of each chunk here its rows among those, as received and as sorted; None: the chunks are the same.
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
        self._places = None
        if here is there:
            for chunk, x_RM, one in zip(self.chunks[0].values(), x, kept, strict=True):
                chunk.x_RM, chunk.kept = x_RM, one
        else:
            self._x_RM, self._kept, self._places = Kept(x), Kept(kept), here.rows_of(there)

    def recall(self, task: Task) -> None:
        if self._places is not None:
            chunk, (received, in_order) = self.chunk(task), self._places[task.chunk or 0]
            chunk.x_RM, chunk.kept = self._x_RM.rows(received), self._kept.rows(in_order)

    @property
    def dweights(self) -> list[Tensor]:
        return [present(chunk.weight_R) for chunk in self.chunks[0].values()]


class _ThroughExperts(Function):
    operation = "the way through the experts of several ranks (MoELayer, moe_layer)"

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_N: Tensor | None, batch: RowBatch, *parameters: Tensor | None) -> Tensor:
        chunks, exchange, experts = batch.forward_chunks, batch.exchange, batch.experts
        weights: list[Tensor | None] = [None] * len(chunks.parts)
        if weight_N is not None:
            weights = [*chunks.split(exchange.all_gather(exchange.dispatch(weight_N[:, None]))[:, 0])]
        forward = _Forward(batch, chunks, permute(x_SM, chunks.layout), weights)
        out_NM = forward.run()
        received, kept = zip(*((chunk.x_RM, chunk.kept) for chunk in forward.chunks[0].values()), strict=True)
        # What a chunk keeps is a tensor, or a graph of its own.
        tensors = kept if experts.any_degree else ()
        ctx.batch, ctx.kept = replace(batch, experts=experts.for_backward()), () if tensors else kept
        ctx.batch.__dict__["forward_chunks"] = chunks
        ctx.weighted = None if weight_N is None else weight_N.dtype
        ctx.save_for_backward(*received, *weights, *tensors, *parameters)
        return gather_sum(out_NM, chunks.layout)

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
        backward = _Backward(batch, permute(dy_SM.contiguous(), chunks.layout), weights, received, kept)
        del saved, received, kept, rest
        dx_SM = gather_sum(backward.run(), chunks.layout)
        dweight_N = None
        if ctx.weighted is not None:
            dweight_R1 = chunks.join([dweight.to(ctx.weighted) for dweight in backward.dweights])[:, None]
            dweight_N = exchange.combine(exchange.reduce_scatter(dweight_R1))[:, 0]
        copies = batch.run.copies
        if copies is not None:
            copies.send_back(batch.experts.parameters, backward.totals[0])
        if batch.run.gradients is not None:
            batch.run.gradients.begin(batch.run.beside, None if copies is None else copies.wait)
        pairs = zip(backward.totals[0] or (), parameters, strict=True)
        grads = (None if total is None or p is None else total.to(p.dtype) for total, p in pairs)
        return dx_SM, dweight_N, None, *grads


def through_experts(
    x_SM: Tensor, weight_N: Tensor | None, layout: Layout, exchange: Exchange, experts: ChunkExperts, run: Run
) -> Tensor:
    """Σ over a token's rows of their weighted results, through the experts' ranks, by the plans of `run`. Collective.

    Args:
        x_SM: [S, M] tokens; `layout` says which rows copy which.
        weight_N: [N] router weight of each sorted row, or None for 1.
        layout: tokens sorted by expert, without slack.
        exchange: made of that layout's counts.
        experts: the local ones.
    Returns:
        [S, M]
    Saves for backward:
        received rows, R·M, and what the experts keep, the pre-activation R·H (gated 2·R·H); where the two plans differ
        in degree, the backward copies both once.
    Raises:
        ConfigError: plans that these experts cannot follow.
        RankError: see `fusedmoe.comm.collectives`.
    """
    degrees = run.degree("forward"), run.degree("backward")
    if not experts.any_degree and degrees[0] != degrees[1]:
        raise ConfigError(
            f"experts that are modules of their own need one degree for both passes, not {degrees[0]} forward and "
            f"{degrees[1]} backward: their backward follows the forward's chunks"
        )
    return _ThroughExperts.apply(x_SM, weight_N, RowBatch(layout, exchange, experts, run), *experts.parameters)
