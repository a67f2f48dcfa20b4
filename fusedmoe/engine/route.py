"""A batch's way to its experts' ranks and back, by puts: what both passes of the fused operations do with buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.receive_buffers import ReceiveBuffers
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Addresses, Arrivals, Put, Sends, Wait, find_rows, plan_sends, read_metadata
from fusedmoe.kernels.triton.one_sided.put import give_credit, put_rows
from fusedmoe.kernels.triton.one_sided.wait import wait_metadata, wait_signals


class RouteChunks:
    """What comes to a rank in one pass, chunk by chunk: the rows, and where their results go.

    Attributes:
        arrivals: of each chunk.
    """

    def __init__(self, buffers: ReceiveBuffers, arrivals: Sequence[Arrivals]) -> None:
        self.buffers, self.arrivals = buffers, arrivals

    def __len__(self) -> int:
        return len(self.arrivals)

    def arriving(self, chunk: int, epoch: int) -> tuple[Tensor, Layout, Wait]:
        """Rows that may be on their way still: the buffers' rows, which of them a chunk needs, and how to wait."""
        tokens = self.buffers.tokens
        x_CM, layout = tokens.rows.view(-1, tokens.rows.shape[-1]), self.arrivals[chunk].layout
        assert layout.source_N is not None
        first = tokens.slot(epoch) * tokens.peers * tokens.rows.shape[2]
        wait = Wait(tokens.signals, tokens.tile, epoch, self.buffers.bounds, self.buffers.network)
        return x_CM, replace(layout, source_N=layout.source_N + first), wait

    def take(self, chunk: int, epoch: int) -> Tensor:
        """[R, M]: a chunk's rows, sorted by expert, copied out of the receive buffer. They are known to be there."""
        x_CM, layout, _ = self.arriving(chunk, epoch)
        return permute(x_CM, layout)

    def await_tokens(self, chunk: int, epoch: int) -> None:
        """Waits for a chunk's rows."""
        _, layout, wait = self.arriving(chunk, epoch)
        assert layout.source_N is not None
        # Slack rows are some row's that is awaited anyway, or of the first tile, which is always signalled.
        with self.buffers.watch.over():
            index = layout.source_N.div(wait.tile, rounding_mode="floor").to(torch.int32)
            wanted = index.unique() if not index.is_cuda else index
            wait_signals(wait.signals, wanted, epoch, wait.bounds, wait.network)

    def put(self, chunk: int, epoch: int, weight_R: Tensor | None = None) -> Put:
        """Where the results of a chunk go."""
        buffers, arrivals = self.buffers, self.arrivals[chunk]
        addresses = buffers.result_addresses(arrivals.peer_R, arrivals.place_R, epoch, self._rows_before(chunk))
        mark = buffers.result_mark(chunk, epoch)
        signal_W = buffers.result_signals(mark)
        return Put(buffers.results.rows, addresses, weight_R, arrivals.wanted_W, signal_W, epoch, mark)

    def value_addresses(self, chunk: int, epoch: int) -> Addresses:
        """Where one number to each row of a chunk goes, to be put before the chunk's rows."""
        arrivals = self.arrivals[chunk]
        return self.buffers.value_addresses(arrivals.peer_R, arrivals.place_R, epoch, self._rows_before(chunk))

    def find(self, there: RouteChunks) -> list[Tensor]:
        """Of each chunk where its rows are among those of other chunks of the same rows."""
        results = self.buffers.results
        return find_rows(there.arrivals, self.arrivals, results.peers, results.rows.shape[2])

    def _rows_before(self, chunk: int) -> int:
        """Of chunks that come before, as they are laid out."""
        return sum(arrivals.layout.rows for arrivals in self.arrivals[:chunk])


class Route:
    """One batch's way. Ranks call its methods in the same order; see `fusedmoe.engine.one_sided_experts` for who does.

    Args:
        layout: of the tokens over all E experts; rank p of the buffers' group has those from p·E/W on.
        weight_N: router weights of sorted rows, or None for 1.
        degrees: chunks forward and backward.
        dtype, width: of rows.
    Raises:
        ConfigError: no room for so many tokens, slots or chunks; nothing has been sent then.
    """

    def __init__(
        self,
        buffers: ReceiveBuffers,
        layout: Layout,
        weight_N: Tensor | None,
        degrees: tuple[int, int],
        dtype: torch.dtype,
        width: int,
    ) -> None:
        buffers.refuse(layout.tokens, layout.k if layout.tokens else 0, max(degrees), dtype, width)
        self.buffers, self.layout, self.degrees = buffers, layout, degrees
        self._capacity, lines = buffers.tokens.rows.shape[2], buffers.metadata.rows.shape[2]
        peers = buffers.heap.group.size
        self._sends: Sends = plan_sends(layout, weight_N, peers, math.lcm(*degrees), self._capacity, lines)
        self._metadata_epoch = 0

    def put_metadata(self) -> None:
        """Tells each rank what comes; the first thing to do."""
        buffers, sends = self.buffers, self._sends
        self._metadata_epoch = buffers.begin(buffers.metadata)
        with buffers.watch.over():
            put_rows(
                sends.metadata, sends.line_WC, sends.line_used_W, buffers.metadata, self._metadata_epoch, buffers.bounds
            )

    @property
    def forward(self) -> RouteChunks:
        """What comes here in the forward pass; the first to ask waits for all routing metadata."""
        return self._passes[0]

    @property
    def backward(self) -> RouteChunks:
        """The same of the backward pass; the same object where it has as many chunks."""
        return self._passes[1]

    @property
    def arrivals(self) -> Sequence[Arrivals]:
        """Chunk by chunk what comes here in the forward pass."""
        return self.forward.arrivals

    @cached_property
    def _passes(self) -> tuple[RouteChunks, RouteChunks]:
        buffers, metadata = self.buffers, self.buffers.metadata
        with buffers.watch.over():
            wait_metadata(metadata, buffers.experts, self._metadata_epoch, buffers.bounds)
        metadata_WC2 = metadata.rows[metadata.slot(self._metadata_epoch)]

        def read(degree: int) -> RouteChunks:
            rows = self._rows_of_chunks(metadata_WC2, degree)
            return RouteChunks(buffers, read_metadata(metadata_WC2, buffers.experts, degree, self._capacity, rows))

        there, back = self.degrees
        forward = read(there)
        found = forward, forward if back == there else read(back)
        give_credit(metadata, self._metadata_epoch)
        return found

    def put_tokens(self, x_SM: Tensor) -> int:
        """Puts each token, or its result's gradient, to every rank that has experts of it. The exchange's number."""
        buffers, sends = self.buffers, self._sends
        epoch = buffers.begin(buffers.tokens)
        with buffers.watch.over():
            put_rows(x_SM.contiguous(), sends.token_WC, sends.token_used_W, buffers.tokens, epoch, buffers.bounds)
        return epoch

    def read(self, epoch: int) -> None:
        """Nothing of this exchange's tokens will be read again."""
        give_credit(self.buffers.tokens, epoch)

    def begin_results(self) -> int:
        """The number of the exchange of results that begins, once peers have read what is in its slot."""
        buffers, results = self.buffers, self.buffers.results
        epoch = buffers.begin(results)
        every = torch.arange(results.peers, dtype=torch.int32, device=buffers.heap.device)
        with buffers.watch.over():
            wait_signals(results.credits, every, buffers.results_behind(epoch), buffers.bounds)
        return epoch

    def receive(self, epoch: int, degree: int) -> tuple[Tensor, Tensor]:
        """[S, M] the sum of each token's results, which come in so many chunks, and [N] float32 the numbers to them."""
        buffers, results = self.buffers, self.buffers.results
        with buffers.watch.over():
            awaited = buffers.awaited_results(degree, epoch)
            wait_signals(results.signals, awaited, epoch, buffers.bounds, buffers.network)
        slot = results.slot(epoch)
        y_SM = gather_sum(results.rows[slot, 0, : self.layout.rows], self.layout)
        values_N = buffers.values.own[slot, : self.layout.rows].clone()
        give_credit(results, epoch)
        return y_SM, values_N

    def _rows_of_chunks(self, metadata_WC2: Tensor, degree: int) -> Sequence[int]:
        """Rows of each chunk; on a GPU bounds on them, since nobody waits for it."""
        sizes, local = self.buffers.sizes, self.buffers.experts
        if metadata_WC2.is_cuda:
            most = -(-sizes.tokens * sizes.k // degree) + local
            return [most * len(metadata_WC2)] * degree
        counts = metadata_WC2[:, :local, 0].long()
        return [int((counts * (j + 1) // degree - counts * j // degree).sum()) for j in range(degree)]
