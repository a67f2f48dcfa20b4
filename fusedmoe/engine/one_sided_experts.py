"""Experts over ranks without collectives: kernels put tokens to their experts' ranks, compute on tiles as their rows
come, and put results straight back. `Route` is a batch's way, `Forward` and `Backward` run both passes along it.

Values and gradients are those of the collectives (`engine/collectives_dispatcher.py`) to rounding: a result comes back
for each (token, k) pair, to be added up k by k, and by collectives a sum of each rank. The backward is the other way by
the same means.

All of it goes in chunks: an expert's rows are shared out evenly (`kernels/one_sided.py`), and each chunk has kernels
of its own, which wait for its rows and put its results. So a chunk's results may still be on their way while the next
one is computed. The backward may have other chunks than the forward: the forward pass ends with all rows in the
receive buffer, and keeps them by the backward's chunks; pre-activations are copied to these as they begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts, Totals
from fusedmoe.engine.chunks import concatenated, taken
from fusedmoe.engine.stash import Stash, StashedRows, TakePages
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.gather_sum import gather_sum, put_pairs
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import (
    Addresses,
    Arrivals,
    ArrivedChunk,
    Put,
    ReceiveBuffer,
    RowLimit,
    Sends,
    Wait,
    contiguous,
    find_rows,
)
from fusedmoe.kernels.triton.experts import backward_rows_in_flight, forward_in_flight
from fusedmoe.kernels.triton.grouped.call import ChunkTiles, Tiles
from fusedmoe.kernels.triton.one_sided.plan import plan_sends, read_metadata, take_rows
from fusedmoe.kernels.triton.one_sided.put import SentRows, give_credit, put_rows, tell_faults
from fusedmoe.kernels.triton.one_sided.remote import wait_metadata, wait_signals
from fusedmoe.runtime.recorder import Recorder, span


class RouteChunks:
    """The rows that come to a rank in one pass, chunk by chunk: the rows, and where their results go.

    Attributes:
        arrivals: of each chunk.
    """

    def __init__(self, buffers: ReceiveBuffers, chunks: Sequence[ArrivedChunk]) -> None:
        self.buffers, self._chunks = buffers, chunks
        self.arrivals: Sequence[Arrivals] = [chunk.arrivals for chunk in chunks]
        layouts = [arrivals.layout for arrivals in self.arrivals]
        self._tiles = ChunkTiles([layout.offsets_E1 for layout in layouts], layouts[0].rows)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def layouts(self) -> list[Layout]:
        """The rows of each chunk, sorted by expert, which are to be looked up in a slot's rows."""
        return [arrivals.layout for arrivals in self.arrivals]

    def arriving(self, chunk: int, slot: int) -> tuple[Tensor, Layout, Wait]:
        """Returns rows that may still be on their way: the slot's rows, those that a chunk needs, and how to wait."""
        buffers = self.buffers
        tokens = buffers.tokens
        wait = Wait(buffers.token_signals[slot], tokens.tile, tokens.epochs[slot], buffers.bounds, buffers.network)
        return buffers.token_rows[slot], self.arrivals[chunk].layout, wait

    def tiles(self, chunk: int) -> partial[Tiles]:
        """Returns what gives a chunk's row tiles by their height; those of all chunks are made at once."""
        return partial(self._tiles.of, chunk)

    def take(self, slot: int) -> list[Tensor]:
        """Copies each chunk's rows, [R, M], sorted by expert, out of the receive buffer, where they are known to be."""
        return take_rows(self.buffers.token_rows[slot], self.arrivals)

    def await_tokens(self, chunk: int, slot: int) -> None:
        """Waits for a chunk's rows."""
        _, layout, wait = self.arriving(chunk, slot)
        assert layout.source_N is not None
        # Slack rows are some row's that is awaited anyway, or of the first tile, which is always signalled.
        with self.buffers.watch.over():
            index = layout.source_N.div(wait.tile, rounding_mode="floor").to(torch.int32)
            wanted = index.unique() if not index.is_cuda else index
            wait_signals(wait.signals, wanted, wait.epoch, wait.bounds, wait.network)

    def put(self, chunk: int, slot: int, weight_R: Tensor | None = None) -> Put:
        """Returns the place that the results of a chunk go to, in the forward pass with their weights."""
        buffers, received = self.buffers, self._chunks[chunk]
        mark = buffers.result_mark(chunk, slot)
        counter_W = received.counters[weight_R is None]
        addresses, wanted_W = received.results[slot], received.arrivals.wanted_W
        ends = (wanted_W, counter_W, buffers.result_signals(mark), buffers.results.epochs[slot])
        return Put(buffers.results.rows, addresses, weight_R, *ends, mark)

    def value_addresses(self, chunk: int, slot: int) -> Addresses:
        """Returns the addresses of one number to each row of a chunk, to be put before the chunk's rows."""
        return self._chunks[chunk].values[slot]

    def find(self, there: RouteChunks) -> list[Tensor]:
        """Finds for each chunk its rows among those of other chunks of the same rows."""
        results = self.buffers.results
        return find_rows(there.arrivals, self.arrivals, results.peers, results.rows.shape[2])


class Route:
    """One batch's way to its experts' ranks and back. Ranks call its methods in the same order.

    Args:
        layout: of the tokens over all E experts; rank p of the buffers' group has those from p·E/W on.
        weight_SK: router weights of pairs, or None for 1.
        degrees: chunks forward and backward.
        dtype, width: of rows.
        rows: a bound on the rows that come to this rank's experts, of all ranks' the same; None: there is none.
        name: of who sends, for errors; the same on all ranks.
        take: gives what the forward keeps pages of a stash (`Stash.claim`); None: it keeps tensors.
    Attributes:
        stashed: what the forward keeps in pages of a stash, once it is known what comes; None: nothing.
    Raises:
        ConfigError: no room for so many tokens, slots or chunks; nothing has been sent then.
    """

    def __init__(
        self,
        buffers: ReceiveBuffers,
        layout: Layout,
        weight_SK: Tensor | None,
        degrees: tuple[int, int],
        dtype: torch.dtype,
        width: int,
        rows: int | None = None,
        name: str = "fused_experts",
        take: TakePages | None = None,
    ) -> None:
        if rows is not None and rows < 1:
            raise ConfigError(
                f"{name}: rows={rows}; give a bound of at least 1 on the rows of a rank's experts, or None"
            )
        buffers.refuse(layout.tokens, layout.k if layout.tokens else 0, max(degrees), dtype, width)
        self.buffers, self.layout, self.degrees = buffers, layout, degrees
        self._capacity, lines = buffers.tokens.rows.shape[2], buffers.metadata.rows.shape[2]
        peers = buffers.heap.group.size
        self._sends: Sends = plan_sends(layout, weight_SK, peers, math.lcm(*degrees), self._capacity, lines)
        self._metadata_slot, self._limit = 0, None
        self._metadata_put = self._metadata_awaited = False
        if rows is not None:
            text = f"rows came to the experts of {name} on this rank, and there is room for {rows}: {_MORE_ROOM}"
            self._limit = RowLimit(rows, buffers.faults.own, buffers.watch.number(text))
        self._take_pages = take
        self.stashed: StashedRows | None = None
        # Buffers and slots that have been read, and no peer has been told of.
        self._read: list[tuple[ReceiveBuffer, int]] = []

    def put_metadata(self) -> None:
        """Tells each rank what comes, before tokens do."""
        lines = self._begin_metadata()
        with self.buffers.watch.over():
            put_rows(self.buffers.bounds, lines)

    def _begin_metadata(self) -> SentRows:
        buffers, sends = self.buffers, self._sends
        self._metadata_slot, self._metadata_put = buffers.begin(buffers.metadata), True
        return SentRows(sends.metadata, sends.line_WC, sends.line_used_W, buffers.metadata, self._metadata_slot)

    @property
    def forward(self) -> RouteChunks:
        """The rows that come here in the forward pass; the first to ask waits for all routing metadata."""
        return self._passes[0]

    @property
    def backward(self) -> RouteChunks:
        """The rows that come in the backward pass; the forward pass's object where it has as many chunks."""
        return self._passes[1]

    @property
    def arrivals(self) -> Sequence[Arrivals]:
        """The arrivals of the forward pass, chunk by chunk."""
        return self.forward.arrivals

    @cached_property
    def _passes(self) -> tuple[RouteChunks, RouteChunks]:
        buffers, metadata = self.buffers, self.buffers.metadata
        if not self._metadata_awaited:
            self._await_metadata()
        metadata_WC2 = buffers.metadata_lines[self._metadata_slot]

        def read(degree: int) -> RouteChunks:
            sizes = buffers.experts, degree, self._capacity, self._most_rows(metadata_WC2, degree)
            ways = buffers.returned, buffers.returned_values, self._limit
            return RouteChunks(buffers, read_metadata(metadata_WC2, *sizes, *ways))

        there, back = self.degrees
        forward = read(there)
        found = forward, forward if back == there else read(back)
        self._read.append((metadata, self._metadata_slot))
        if self._take_pages is not None:
            self.stashed = self._take_pages(found[1].layouts)
        if self._limit is not None:
            self.tell_faults()
        return found

    def tell_faults(self) -> None:
        """Tells all ranks what this one has found wrong, if anything, before it puts results."""
        tell_faults(self.buffers.faults, self.buffers.results.me, self.buffers.network)

    def put_tokens(self, x_SM: Tensor) -> int:
        """Puts each token, or its result's gradient, to every rank that has experts of it; returns the slot. The same
        launch tells what comes, where nothing has told it yet."""
        buffers, sends = self.buffers, self._sends
        lines = None if self._metadata_put else self._begin_metadata()
        slot = buffers.begin(buffers.tokens)
        tokens = SentRows(x_SM.contiguous(), sends.token_WC, sends.token_used_W, buffers.tokens, slot)
        with buffers.watch.over():
            put_rows(buffers.bounds, *((tokens,) if lines is None else (lines, tokens)))
        return slot

    def read(self, slot: int) -> None:
        """Notes that none of the tokens in this slot will be read again."""
        self._read.append((self.buffers.tokens, slot))

    def give_credit(self) -> None:
        """Tells the ranks what has been read, all in one launch: nobody needs to know before the second next batch."""
        (buffer, slot), *others = self._read
        give_credit(buffer, slot, *others, faults=None if self._limit is None else self.buffers.faults)
        self._read.clear()

    def begin_results(self) -> int:
        """Begins an exchange of results; returns its slot, which serves again only when every peer has read what was in
        it. Metadata that nobody has waited for is waited for by the same launch."""
        buffers, results = self.buffers, self.buffers.results
        slot = buffers.begin(results)
        if not self._metadata_awaited:
            self._await_metadata((results, slot))
            return slot
        with buffers.watch.over():
            wait_signals(results.credits, buffers.credit_W[slot], results.epochs[slot], buffers.bounds, behind=1)
        return slot

    def _await_metadata(self, results: tuple[ReceiveBuffer, int] | None = None) -> None:
        buffers, self._metadata_awaited = self.buffers, True
        with buffers.watch.over():
            wait_metadata(buffers.metadata, buffers.experts, self._metadata_slot, buffers.bounds, results)

    def receive(self, slot: int, degree: int) -> Tensor:
        """Returns [S, M], the sum of each token's results, which come in `degree` chunks."""
        y_SM = self._sum_results(slot, degree)
        self._read.append((self.buffers.results, slot))
        self.give_credit()
        return y_SM

    def receive_with_values(self, slot: int, degree: int) -> tuple[Tensor, Tensor]:
        """Returns what `receive` does, and the float32 number that came with each pair's result, [S, K]."""
        buffers, results = self.buffers, self.buffers.results
        y_SM = self._sum_results(slot, degree)
        # Copied before the slot is given back: another batch's values may come at once.
        value_SK = put_pairs(buffers.value_rows[slot], self.layout)
        self._read.append((results, slot))
        self.give_credit()
        return y_SM, value_SK

    def _sum_results(self, slot: int, degree: int) -> Tensor:
        buffers, results = self.buffers, self.buffers.results
        with buffers.watch.over():
            awaited = buffers.awaited_results(degree, slot)
            wait_signals(results.signals, awaited, results.epochs[slot], buffers.bounds, buffers.network)
        return gather_sum(buffers.result_rows[slot], self.layout)

    def _most_rows(self, metadata_WC2: Tensor, degree: int) -> int:
        """Counts the rows of the largest chunk; with a bound on all rows, and on a GPU, bounds them: nobody waits."""
        sizes, local, peers = self.buffers.sizes, self.buffers.experts, len(metadata_WC2)
        if metadata_WC2.is_cuda or self._limit is not None:
            most = sizes.tokens * sizes.k * peers
            most = most if self._limit is None else min(most, self._limit.most)
            # Rounding gives a chunk a row more of each expert and source.
            return -(-most // degree) + local * peers
        count_G = metadata_WC2.numpy()[:, :local, 0].ravel().tolist()
        return max(sum(count * (j + 1) // degree - count * j // degree for count in count_G) for j in range(degree))


_MORE_ROOM = (
    "results since then are wrong. Give more room (row_factor of a Schedule, rows of fused_experts), or have the gate "
    "spread tokens more evenly"
)


class Measured(NamedTuple):
    """A recorder for spans, and the kind of task that they are of (`fusedmoe.schedule.task.FUSED`)."""

    recorder: Recorder | None
    kind: str
    links: tuple[str, ...]


def _span(measured: Measured | None, phase: str, chunk: int) -> AbstractContextManager[None]:
    if measured is None:
        return nullcontext()
    recorder, kind, links = measured
    return span(recorder, kind, kind=kind, chunk=chunk, phase=phase, also=links)


def make_route(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    degree: int | tuple[int, int] = 1,
    rows: int | None = None,
    name: str = "fused_experts",
    take: TakePages | None = None,
) -> Route:
    """Makes the way of a batch's tokens. Nothing is sent yet.

    Args:
        x_SM: [S, M] tokens, or what is like them. weight_SK: router weight of each slot, or None for 1.
        layout: of all E experts; rank p of the buffers' group has those from p·E/W on.
        degree: chunks in which results are computed and come back; two numbers: forward and backward.
        rows, name: as for `fused_experts`.   take: as for `Route`.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the receive buffers have room for.
    """
    degrees = (degree, degree) if isinstance(degree, int) else degree
    return Route(buffers, layout, weight_SK, degrees, x_SM.dtype, x_SM.shape[1], rows, name, take)


class Forward:
    """The forward pass of `fused_experts` in three steps, which virtual ranks of one process take in turn.

    Attributes:
        x: received rows [R, M] of each chunk of the backward pass; None where that does not read them.
        h: pre-activations [R, (2,) H] of each chunk of the forward pass.
        Both are empty where a stash has them.
    """

    def __init__(self, x_SM: Tensor, route: Route, experts: GroupedExperts, measured: Measured | None = None) -> None:
        self._x_SM, self.route, self.experts, self.measured = x_SM, route, experts, measured
        self.x: list[Tensor | None] = []
        self.h: list[Tensor] = []
        self._tokens = self._results = 0

    def send(self) -> None:
        self._tokens = self.route.put_tokens(self._x_SM)

    def compute(self) -> None:
        route = self.route
        self._results = route.begin_results()
        chunks = route.forward
        for chunk, arrivals in enumerate(chunks.arrivals):
            x_CM, layout, wait = chunks.arriving(chunk, self._tokens)
            put = chunks.put(chunk, self._results, arrivals.weight_R)
            with route.buffers.watch.over(), _span(self.measured, "forward", chunk):
                given = (x_CM, layout, chunks.tiles(chunk), self.experts.weights, self.experts.activation)
                h_RH = forward_in_flight(*given, wait, put)
            self.h.append(h_RH)
        # Products of all chunks have waited for all rows.
        keeps, there = self.experts.keeps_rows, route.backward
        if route.stashed is not None:
            if keeps:
                route.stashed.store_x(route.buffers.token_rows[self._tokens], there.layouts)
            route.stashed.store_h(self.h, chunks.layouts)
            self.h.clear()
        else:
            self.x = [*there.take(self._tokens)] if keeps else [None] * len(there)
        route.read(self._tokens)

    def finish(self) -> Tensor:
        """[S, M]"""
        return self.route.receive(self._results, len(self.route.forward))


class Backward:
    """The backward pass of a forward pass, in three steps.

    Attributes:
        totals: gradients of the experts' parameters.
    """

    def __init__(self, forward: Forward, dy_SM: Tensor) -> None:
        self._route, self._experts, self._dy_SM = forward.route, forward.experts, dy_SM
        self._x, self._h, self._measured = forward.x, forward.h, forward.measured
        self._tokens = self._results = 0
        self.totals: Totals = None

    def send(self) -> None:
        self._tokens = self._route.put_tokens(self._dy_SM)

    def compute(self) -> None:
        route, chunks, experts = self._route, self._route.backward, self._experts
        self._results = route.begin_results()
        if route.stashed is not None:
            route.stashed.check(chunks.layouts)
            route.tell_faults()
        left = []
        for chunk, (arrivals, h_RH) in enumerate(zip(chunks.arrivals, self._pre_activations(), strict=True)):
            dy_CM, layout, wait = chunks.arriving(chunk, self._tokens)
            put, values = chunks.put(chunk, self._results), chunks.value_addresses(chunk, self._results)
            with route.buffers.watch.over(), _span(self._measured, "backward", chunk):
                dy_RM, hidden = backward_rows_in_flight(
                    dy_CM, h_RH, layout, chunks.tiles(chunk), arrivals.weight_R, experts.weights, experts.activation,
                    wait, put, values, experts.wanted,
                )  # fmt: skip
            left.append((dy_RM, hidden))
        if experts.wanted.parameters and experts.weights.b2 is None:
            left = [(dy_RM, hidden) for dy_RM, (_, hidden) in zip(chunks.take(self._tokens), left, strict=True)]
        route.read(self._tokens)
        # Sums over rows wait for nothing, and what others wait for is on its way by now.
        for (dy_RM, hidden), x_RM, arrivals in zip(left, self._received(), chunks.arrivals, strict=True):
            if experts.wanted.parameters:
                assert dy_RM is not None
                given = (dy_RM, x_RM, hidden, contiguous(arrivals), arrivals.weight_R)
                self.totals = experts.weight_gradients(*given, self.totals)
        if route.stashed is not None:
            route.stashed.give()

    def _pre_activations(self) -> Iterator[Tensor]:
        """Yields the pre-activations of each chunk, from those that the forward's chunks have kept."""
        there, here, stashed = self._route.forward, self._route.backward, self._route.stashed
        if here is there:
            yield from self._h if stashed is None else stashed.h(there.layouts)
            return
        h_RH = concatenated(self._h if stashed is None else [*stashed.h(there.layouts)])
        yield from (taken(h_RH, index_R) for index_R in here.find(there))

    def _received(self) -> Iterable[Tensor | None]:
        """Returns the received rows of each chunk, [R, M]; None where the backward reads none."""
        chunks, stashed = self._route.backward, self._route.stashed
        if stashed is None:
            return self._x
        return stashed.x(chunks.layouts) if self._experts.keeps_rows else [None] * len(chunks)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns gradients of tokens, [S, M], and of router weights, [S, K] float32."""
        return self._route.receive_with_values(self._results, len(self._route.backward))


class _FusedExperts(Function):
    operation = "fusedmoe.puts.fused_experts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_SK: Tensor | None,
        route: Route,
        experts: GroupedExperts,
        measured: Measured | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        run = Forward(x_SM, route, experts, measured)
        run.send()
        run.compute()
        ctx.run, ctx.weighted = run, None if weight_SK is None else weight_SK.dtype
        return run.finish()

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        # Rows and pre-activations go with this pass: the graph may be kept for longer.
        forward, ctx.run = ctx.run, None
        run = Backward(forward, dy_SM)
        run.send()
        run.compute()
        dx_SM, dweight_SK = run.finish()
        dweight = None if ctx.weighted is None else dweight_SK.to(ctx.weighted)
        return dx_SM, dweight, None, None, None, *_grads(run.totals, forward.experts)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor | None,
    layout: Layout,
    buffers: ReceiveBuffers,
    experts: GroupedExperts,
    degree: int | tuple[int, int] = 1,
    measured: Measured | None = None,
    rows: int | None = None,
    name: str = "fused_experts",
    stash: Stash | None = None,
) -> Tensor:
    """Σ over a token's experts of their weighted results, through the experts' ranks, by puts. Collective.

    Args:
        x_SM, weight_SK, layout, buffers, degree: as for `make_route`.
        experts: the local ones.
        measured: takes spans of both passes.
        rows: a bound on the (token, k) pairs that come to a rank's experts, the same on all ranks, for memory of that
            size; None: on a GPU as many as all ranks can send, else as many as come. With it nothing waits on the host
            and every launch has the same arguments each time, so that a CUDA graph may hold both passes.
        name: of who calls, for errors; the same on all ranks.
        stash: keeps what is saved for backward, together with other calls; on all ranks or none, and only with `rows`.
    Returns:
        [S, M]
    Saves for backward:
        received rows, R·M, unless w1 is frozen, and pre-activations R·H (gated 2·R·H), where R is the bound if there is
        one; with a stash the rows that came, in its pages. Where the passes have different numbers of chunks, the
        backward copies pre-activations once. Tables of about 64 bytes for each of R.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the receive buffers have room for, `rows` below 1,
            or a stash without a bound or for layers of another shape. Nothing has been sent then.
        RankError: a rank failed or did not come; it names rank, peer, what was waited for, expected and seen signal. Or
            in a call before more rows came to a rank than `rows`, or than the stash had pages for; it names rank,
            `name` and both numbers.
    """
    if stash is not None and rows is None:
        raise ConfigError(f"{name}: a stash is for what has a bound; give rows, too")
    take = None if stash is None else stash.claim(x_SM, weight_SK, experts, buffers, name)
    route = make_route(x_SM, weight_SK, layout, buffers, degree, rows, name, take)
    return _FusedExperts.apply(x_SM, weight_SK, route, experts, measured, *experts.parameters)


def _grads(totals: Totals, experts: GroupedExperts) -> list[Tensor | None]:
    parameters = experts.parameters
    pairs = zip(totals or (None,) * len(parameters), parameters, strict=True)
    # Sums over chunks are in float32 where the parameters are narrower.
    return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]
