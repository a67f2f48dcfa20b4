"""The exchanges of one batch by one-sided puts: routing metadata, tokens, results and credit (permission to overwrite).

Forward sends tokens and returns results; backward sends and returns their gradients in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.layout import Layout, Tiles
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
    match_rows,
)
from fusedmoe.kernels.triton.experts import tile_heights
from fusedmoe.kernels.triton.one_sided.plan import copy_received_rows, plan_sends, read_metadata
from fusedmoe.kernels.triton.one_sided.put import SentRows, give_credit, put_rows, send_faults
from fusedmoe.kernels.triton.one_sided.receive import receive
from fusedmoe.kernels.triton.one_sided.remote import wait_metadata, wait_signals


class ReceivedChunks:
    """The rows that this rank receives in one pass, in chunks, and the addresses to which it puts their results."""

    def __init__(self, buffers: ReceiveBuffers, chunks: Sequence[ArrivedChunk], by_arrival: bool) -> None:
        self.buffers, self._chunks, self._is_in_arrival_order = buffers, chunks, by_arrival
        self.arrivals: Sequence[Arrivals] = [chunk.arrivals for chunk in chunks]

    def __len__(self) -> int:
        return len(self.arrivals)

    def rows_in_flight(self, chunk: int, slot: int) -> tuple[Tensor, Layout, Wait]:
        buffers = self.buffers
        tokens = buffers.tokens
        signals, epoch = buffers.token_signals[slot], tokens.epochs[slot]
        wait = Wait(signals, tokens.tile, epoch, buffers.bounds, buffers.network, self._is_in_arrival_order)
        return buffers.token_rows[slot], self.arrivals[chunk].layout, wait

    def tiles(self, chunk: int) -> Mapping[int, Tiles]:
        return self._chunks[chunk].tiles

    def copy_rows(self, slot: int) -> list[Tensor]:
        """Copy each chunk's received rows, [R, M], sorted by expert, out of the receive buffer."""
        return copy_received_rows(self.buffers.token_rows[slot], self.arrivals)

    def make_put(self, chunk: int, slot: int, weight_R: Tensor | None = None) -> Put:
        """Return the `Put` for the results of a chunk, multiplied by `weight_R` if given (in forward)."""
        buffers, received = self.buffers, self._chunks[chunk]
        signal = buffers.result_signal(chunk, slot)
        counter_W = received.counters[weight_R is None]
        addresses, num_rows_W = received.results[slot], received.arrivals.num_rows_W
        ends = (num_rows_W, counter_W, buffers.result_signal_addresses(signal), buffers.results.epochs[slot])
        return Put(buffers.results.rows, addresses, weight_R, *ends, signal)

    def value_addresses(self, chunk: int, slot: int) -> Addresses:
        """Return the addresses for one scalar per row of a chunk, put before the rows."""
        return self._chunks[chunk].values[slot]

    def indices_in(self, other: ReceivedChunks) -> list[Tensor]:
        """Return, per chunk, the indices of its rows in the joined chunks of `other`, which hold the same rows."""
        results = self.buffers.results
        return match_rows(other.arrivals, self.arrivals, results.num_peers, results.rows.shape[2])


class Route:
    """Sends one batch to its experts' ranks and receives the results. Ranks call its methods in the same order.

    Args:
        x_SM: [S, M] tokens; only shape, dtype and device are used.
        weight_SK: router weights, or None for 1.
        layout: of the tokens over all E experts. Rank p of the W ranks has experts p·E/W to (p + 1)·E/W − 1.
        degree: chunks in which results are computed and sent; two numbers: forward and backward.
        rows: maximum rows received by a rank's experts, the same on all ranks; None: unlimited.
    Raises:
        ConfigError: more tokens, choices per token or chunks than the buffers hold, or tokens of another dtype or
            width; `rows` < 1; a CPU without Triton's interpreter.
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
        buffers.check_batch(layout.tokens, layout.k if layout.tokens else 0, max(degrees), x_SM.dtype, x_SM.shape[1])
        self.buffers, self.layout, self.degrees = buffers, layout, degrees
        self._capacity, lines = buffers.tokens.rows.shape[2], buffers.metadata.rows.shape[2]
        peers = buffers.heap.group.size
        self._sends: Sends = plan_sends(layout, weight_SK, peers, math.lcm(*degrees), self._capacity, lines)
        self._metadata_slot, self._row_limit = 0, None
        self._metadata_put = False
        if rows is not None:
            text = f"rows came to the experts of {name} on this rank, and there is room for {rows}: {_ROW_LIMIT_FIX}"
            self._row_limit = RowLimit(rows, buffers.faults.own, buffers.watch.fault_number(text))
        # Slots that were read, for which peers have no credit yet.
        self._slots_to_credit: list[tuple[ReceiveBuffer, int]] = []

    def put_metadata(self) -> None:
        lines = self._begin_metadata()
        with self.buffers.watch.guard_launches():
            put_rows(self.buffers.bounds, lines)

    def _begin_metadata(self) -> SentRows:
        buffers, sends = self.buffers, self._sends
        self._metadata_slot, self._metadata_put = buffers.next_slot(buffers.metadata), True
        return SentRows(sends.metadata, sends.line_WC, sends.line_used_W, buffers.metadata, self._metadata_slot)

    @property
    def forward(self) -> ReceivedChunks:
        """The rows received in the forward pass; the first access waits for all routing metadata."""
        return self._received_by_pass[0]

    @property
    def backward(self) -> ReceivedChunks:
        """The rows received in the backward pass; the same object as `forward` if the numbers of chunks are equal."""
        return self._received_by_pass[1]

    @cached_property
    def _received_by_pass(self) -> tuple[ReceivedChunks, ReceivedChunks]:
        return self._wait_for_metadata()

    def _wait_for_metadata(
        self, results: tuple[ReceiveBuffer, int] | None = None
    ) -> tuple[ReceivedChunks, ReceivedChunks]:
        """Wait for all routing metadata (and for credit in a slot of results, if given), and read it."""
        buffers, metadata = self.buffers, self.buffers.metadata
        with buffers.watch.guard_launches():
            wait_metadata(metadata, buffers.experts, self._metadata_slot, buffers.bounds, results)
        metadata_WC2 = buffers.metadata_lines[self._metadata_slot]

        # Several chunks hide the dispatch otherwise. Peers on other nodes get longer runs of results if rows are in
        # order of sources.
        tile = buffers.tokens.tile
        by_arrival = self.degrees == (1, 1) and buffers.network is None and self._capacity > tile
        arrival_tile = tile if by_arrival else None

        def read(degree: int) -> ReceivedChunks:
            sizes = buffers.experts, degree, self._capacity, self._max_rows(metadata_WC2, degree)
            destinations = buffers.returned, buffers.value_return_buffers
            heights = tile_heights(buffers.sizes.dtype, metadata_WC2.device)
            chunks = read_metadata(metadata_WC2, *sizes, *destinations, heights, self._row_limit, arrival_tile)
            return ReceivedChunks(buffers, chunks, by_arrival)

        forward_degree, backward_degree = self.degrees
        forward = read(forward_degree)
        passes = forward, forward if backward_degree == forward_degree else read(backward_degree)
        self._slots_to_credit.append((metadata, self._metadata_slot))
        if self._row_limit is not None:
            # Before this rank puts results, with which all ranks receive the fault.
            send_faults(buffers.faults, buffers.results.me, buffers.network)
        return passes

    def put_tokens(self, x_SM: Tensor) -> int:
        """Put each token (or its gradient) to every rank that has experts for it; return the slot.

        Also sends the metadata, in the same launch, if it has not been sent.
        """
        buffers, sends = self.buffers, self._sends
        lines = None if self._metadata_put else self._begin_metadata()
        slot = buffers.next_slot(buffers.tokens)
        tokens = SentRows(x_SM.contiguous(), sends.token_WC, sends.token_used_W, buffers.tokens, slot)
        with buffers.watch.guard_launches():
            put_rows(buffers.bounds, *((tokens,) if lines is None else (lines, tokens)))
        return slot

    def mark_as_read(self, slot: int) -> None:
        """Mark the tokens in this slot as read: the next credit permits their senders to overwrite them."""
        self._slots_to_credit.append((self.buffers.tokens, slot))

    def give_credit(self) -> None:
        """Send credit for all slots read so far. Not needed before `wait_for_results`, which also sends it."""
        (buffer, slot), *others = self._slots_to_credit
        give_credit(buffer, slot, *others, faults=self._peer_faults)
        self._slots_to_credit.clear()

    def begin_results(self) -> int:
        """Begin an exchange of results; return its slot, which is reused only after every peer has read it.

        If the routing metadata has not been read yet, the same launch waits for it and reads it.
        """
        buffers, results = self.buffers, self.buffers.results
        slot = buffers.next_slot(results)
        if "_received_by_pass" in vars(self):  # already read
            with buffers.watch.guard_launches():
                wait_signals(results.credits, buffers.credit_W[slot], results.epochs[slot], buffers.bounds, behind=1)
        else:
            self._received_by_pass = self._wait_for_metadata((results, slot))
        return slot

    def wait_for_results(self, slot: int, degree: int) -> Tensor:
        """Wait for the results, put in `degree` chunks, and return their sum per token, [S, M]."""
        y_SM, _ = self._receive(slot, degree, None)
        return y_SM

    def wait_for_results_and_values(self, slot: int, degree: int) -> tuple[Tensor, Tensor]:
        """Like `wait_for_results`; also return the scalar of each (token, k) pair (`value_addresses`), [S, K]."""
        y_SM, value_SK = self._receive(slot, degree, self.buffers.value_rows[slot])
        assert value_SK is not None
        return y_SM, value_SK

    def _receive(self, slot: int, degree: int, value_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        buffers, results = self.buffers, self.buffers.results
        with buffers.watch.guard_launches():
            awaited = buffers.result_signal_indices(degree, slot)
            wait_signals(results.signals, awaited, results.epochs[slot], buffers.bounds, buffers.network)
        read, self._slots_to_credit = [*self._slots_to_credit, (results, slot)], []
        return receive(buffers.result_rows[slot], self.layout, value_R, buffers.num_finished, read, self._peer_faults)

    @property
    def _peer_faults(self) -> Faults | None:
        """Faults reported by peers, checked when credit is sent; None without a row limit."""
        return None if self._row_limit is None else self.buffers.faults

    def _max_rows(self, metadata_WC2: Tensor, degree: int) -> int:
        """Return the rows of the largest chunk; on a GPU or with a row limit, an upper bound without synchronizing."""
        sizes, local, peers = self.buffers.sizes, self.buffers.experts, len(metadata_WC2)
        if metadata_WC2.is_cuda or self._row_limit is not None:
            max_rows = sizes.tokens * sizes.k * peers
            max_rows = max_rows if self._row_limit is None else min(max_rows, self._row_limit.max_rows)
            # Rounding adds up to one row per expert and source to a chunk.
            return -(-max_rows // degree) + local * peers
        count_G = metadata_WC2.numpy()[:, :local, 0].ravel().tolist()
        return max(sum(count * (j + 1) // degree - count * j // degree for count in count_G) for j in range(degree))


_ROW_LIMIT_FIX = (
    "results since then are wrong. Give more room (row_factor of a Schedule, rows of fused_experts), or have the gate "
    "spread tokens more evenly"
)
