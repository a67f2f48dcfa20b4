"""A batch's way to its experts and back by kernels that put rows: what is told beforehand, sent, awaited and returned.

`Route` is the way of one rank's tokens, `RouteChunks` the rows that come to it in a pass. Tokens, results and their
gradients go along the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import (
    Addresses,
    Arrivals,
    ArrivedChunk,
    Faults,
    Put,
    ReceiveBuffer,
    RowLimit,
    Sends,
    Wait,
    find_rows,
)
from fusedmoe.kernels.tiles import Tiles
from fusedmoe.kernels.triton.experts import tile_heights
from fusedmoe.kernels.triton.one_sided.plan import plan_sends, read_metadata, take_rows
from fusedmoe.kernels.triton.one_sided.put import SentRows, give_credit, put_rows, tell_faults
from fusedmoe.kernels.triton.one_sided.receive import receive
from fusedmoe.kernels.triton.one_sided.remote import wait_metadata, wait_signals


class RouteChunks:
    """The rows that come to a rank in one pass, chunk by chunk: the rows, and where their results go.

    Attributes:
        arrivals: of each chunk.
    """

    def __init__(self, buffers: ReceiveBuffers, chunks: Sequence[ArrivedChunk]) -> None:
        self.buffers, self._chunks = buffers, chunks
        self.arrivals: Sequence[Arrivals] = [chunk.arrivals for chunk in chunks]

    def __len__(self) -> int:
        return len(self.arrivals)

    def arriving(self, chunk: int, slot: int) -> tuple[Tensor, Layout, Wait]:
        """Returns rows that may still be on their way: the slot's rows, those that a chunk needs, and how to wait."""
        buffers = self.buffers
        tokens = buffers.tokens
        wait = Wait(buffers.token_signals[slot], tokens.tile, tokens.epochs[slot], buffers.bounds, buffers.network)
        return buffers.token_rows[slot], self.arrivals[chunk].layout, wait

    def tiles(self, chunk: int) -> Mapping[int, Tiles]:
        """Returns a chunk's row tiles by their height."""
        return self._chunks[chunk].tiles

    def take(self, slot: int) -> list[Tensor]:
        """Copies each chunk's rows, [R, M], sorted by expert, out of the receive buffer, where they are known to be."""
        return take_rows(self.buffers.token_rows[slot], self.arrivals)

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
    """One batch's way to its experts' ranks and back. Ranks call its methods in the same order. Nothing is sent yet.

    Args:
        x_SM: [S, M] tokens, or what is like them.   weight_SK: router weights of pairs, or None for 1.
        layout: of the tokens over all E experts; rank p of the buffers' group has those from p·E/W on.
        degree: chunks in which results are computed and come back; two numbers: forward and backward.
        rows: a bound on the rows that come to this rank's experts, of all ranks' the same; None: there is none.
        name: of who sends, for errors; the same on all ranks.
    Raises:
        ConfigError: more tokens, choices of a token or chunks than the buffers have room for; a CPU without Triton's
            interpreter.
    """

    def __init__(
        self,
        x_SM: Tensor,
        weight_SK: Tensor | None,
        layout: Layout,
        buffers: ReceiveBuffers,
        degree: int | tuple[int, int] = 1,
        rows: int | None = None,
        name: str = "fused_experts",
    ) -> None:
        if rows is not None and rows < 1:
            raise ConfigError(
                f"{name}: rows={rows}; give a bound of at least 1 on the rows of a rank's experts, or None"
            )
        if not uses_triton(x_SM):
            raise ConfigError(
                f"{name}: kernels send the tokens, and on CPUs only Triton's interpreter runs these; set "
                "TRITON_INTERPRET=1 before Python starts"
            )
        degrees = (degree, degree) if isinstance(degree, int) else degree
        buffers.refuse(layout.tokens, layout.k if layout.tokens else 0, max(degrees), x_SM.dtype, x_SM.shape[1])
        self.buffers, self.layout, self.degrees = buffers, layout, degrees
        self._capacity, lines = buffers.tokens.rows.shape[2], buffers.metadata.rows.shape[2]
        peers = buffers.heap.group.size
        self._sends: Sends = plan_sends(layout, weight_SK, peers, math.lcm(*degrees), self._capacity, lines)
        self._metadata_slot, self._limit = 0, None
        self._metadata_put = False
        if rows is not None:
            text = f"rows came to the experts of {name} on this rank, and there is room for {rows}: {_MORE_ROOM}"
            self._limit = RowLimit(rows, buffers.faults.own, buffers.watch.number(text))
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

    @cached_property
    def _passes(self) -> tuple[RouteChunks, RouteChunks]:
        return self._read_metadata()

    def _read_metadata(self, results: tuple[ReceiveBuffer, int] | None = None) -> tuple[RouteChunks, RouteChunks]:
        """Waits for all routing metadata, and with it for credit in a slot of results, and reads what comes."""
        buffers, metadata = self.buffers, self.buffers.metadata
        with buffers.watch.over():
            wait_metadata(metadata, buffers.experts, self._metadata_slot, buffers.bounds, results)
        metadata_WC2 = buffers.metadata_lines[self._metadata_slot]

        def read(degree: int) -> RouteChunks:
            sizes = buffers.experts, degree, self._capacity, self._most_rows(metadata_WC2, degree)
            ways = buffers.returned, buffers.returned_values, tile_heights(buffers.sizes.dtype, metadata_WC2.device)
            return RouteChunks(buffers, read_metadata(metadata_WC2, *sizes, *ways, self._limit))

        there, back = self.degrees
        forward = read(there)
        found = forward, forward if back == there else read(back)
        self._read.append((metadata, self._metadata_slot))
        if self._limit is not None:
            # Before this rank puts results: all ranks receive the fault with these.
            tell_faults(buffers.faults, buffers.results.me, buffers.network)
        return found

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
        """Tells the ranks what has been read, where no results are received that it would be told with."""
        (buffer, slot), *others = self._read
        give_credit(buffer, slot, *others, faults=self._heard)
        self._read.clear()

    def begin_results(self) -> int:
        """Begins an exchange of results; returns its slot, which serves again only when every peer has read what was in
        it. Metadata that nobody has waited for is waited for by the same launch, and read."""
        buffers, results = self.buffers, self.buffers.results
        slot = buffers.begin(results)
        if "_passes" in vars(self):  # they have been read
            with buffers.watch.over():
                wait_signals(results.credits, buffers.credit_W[slot], results.epochs[slot], buffers.bounds, behind=1)
        else:
            self._passes = self._read_metadata((results, slot))
        return slot

    def receive(self, slot: int, degree: int) -> Tensor:
        """Returns [S, M], the sum of each token's results, which come in `degree` chunks."""
        y_SM, _ = self._receive(slot, degree, None)
        return y_SM

    def receive_with_values(self, slot: int, degree: int) -> tuple[Tensor, Tensor]:
        """Returns what `receive` does, and the float32 number that came with each pair's result, [S, K]."""
        y_SM, value_SK = self._receive(slot, degree, self.buffers.value_rows[slot])
        assert value_SK is not None
        return y_SM, value_SK

    def _receive(self, slot: int, degree: int, value_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        buffers, results = self.buffers, self.buffers.results
        with buffers.watch.over():
            awaited = buffers.awaited_results(degree, slot)
            wait_signals(results.signals, awaited, results.epochs[slot], buffers.bounds, buffers.network)
        read, self._read = [*self._read, (results, slot)], []
        return receive(buffers.result_rows[slot], self.layout, value_R, buffers.done, read, self._heard)

    @property
    def _heard(self) -> Faults | None:
        """The faults that peers tell of, which are looked at where credit is given."""
        return None if self._limit is None else self.buffers.faults

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
