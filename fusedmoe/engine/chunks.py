"""Split a layer's tokens into chunks.

Tokens are stored in segments, one per destination rank. Chunk i of r contains tokens ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋ of every
segment of n tokens (`chunk_size`). A chunk contains all (token, k) pairs of its tokens on a rank, so a token's sums do
not depend on r. Rows that are not copies of tokens have one segment per expert instead.

Example: segments of 3 and 2 tokens, a b c | d e, in two chunks: a d | b c e. The order is [0, 3, 1, 2, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import block_order
from fusedmoe.comm.exchange import Exchange, RowExchange
from fusedmoe.kernels.deduplicate import ReceivedPairs, inverse
from fusedmoe.kernels.layout import Layout


def reorder(layout: Layout, order_N: Tensor) -> Layout:
    """Return the layout with its rows permuted by `order_N`. Its counts and offsets stay those of the old order."""
    place_N = inverse(order_N)
    row_SK = torch.where(layout.row_SK < 0, -1, place_N[layout.row_SK.clamp(min=0)]) if len(place_N) else layout.row_SK
    source_N = order_N if layout.source_N is None else layout.source_N[order_N]
    return replace(layout, source_N=source_N, pair_N=layout.pair_N[order_N], row_SK=row_SK)


class RowChunks:
    """The sent and received tokens of a call, split into chunks.

    Args:
        tokens, pairs: the sent tokens by destination, and the (token, expert) pairs of the received tokens.
        k, degree: maximum number of pairs per token, and number of chunks.
    Attributes:
        received: per chunk, the layout that sorts received tokens by local expert.
    """

    def __init__(self, exchange: Exchange, tokens: Layout, pairs: ReceivedPairs, k: int, degree: int) -> None:
        self.layout = tokens
        self.exchanges: list[RowExchange] = [exchange]
        # Index in the whole batch of each received token and pair, in chunk order; None: identity.
        self._token_R: Tensor | None = None
        self._pair_P: Tensor | None = None
        chunks = [pairs]
        if degree > 1:
            cut, device = exchange.split_chunks(degree), tokens.pair_N.device
            self.exchanges = cut.exchanges
            self.layout = reorder(tokens, block_order(cut.sent_Gi, (1, 0), device))
            self._token_R = block_order(cut.recv_Gi, (1, 0), device)
            self._pair_P, chunks = pairs.in_chunks(self._token_R, [each.num_rows for each in self.exchanges])
        rows = [each.num_rows for each in self.exchanges]
        experts = exchange.num_local_experts
        sorted_chunks = [chunk.sort(count, experts, k) for chunk, count in zip(chunks, rows, strict=True)]
        self.received = [layout for layout, _ in sorted_chunks]
        self._orders = [order_N for _, order_N in sorted_chunks]

    def split(self, value_P: Tensor) -> list[Tensor]:
        """Split values of received pairs, in batch order, into chunks sorted by expert."""
        in_order = value_P if self._pair_P is None else value_P[self._pair_P]
        parts = in_order.split([len(order_N) for order_N in self._orders])
        return [value[order_N] for value, order_N in zip(parts, self._orders, strict=True)]

    def join(self, value_parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `split`."""
        pairs = zip(value_parts, self._orders, strict=True)
        in_order = concat([torch.empty_like(value).index_copy_(0, order_N, value) for value, order_N in pairs])
        return in_order if self._pair_P is None else torch.empty_like(in_order).index_copy_(0, self._pair_P, in_order)

    def indices_in(self, others: RowChunks) -> list[tuple[Tensor, Tensor]]:
        """Return, per chunk, the indices of its received tokens and sorted pairs in the joined chunks of `others`."""
        token_R, sorted_P = inverse(concat(others.token_indices())), inverse(concat(others.pair_indices()))
        numbers = zip(self.token_indices(), self.pair_indices(), strict=True)
        return [(token_R[tokens], sorted_P[pairs]) for tokens, pairs in numbers]

    def token_indices(self) -> Sequence[Tensor]:
        """Return the indices of each chunk's received tokens in the whole batch."""
        rows = [each.num_rows for each in self.exchanges]
        token_R = self._token_R
        if token_R is None:
            token_R = torch.arange(sum(rows), device=self._orders[0].device)
        return token_R.split(rows)

    def pair_indices(self) -> Sequence[Tensor]:
        """Return the indices of each chunk's pairs in the whole batch, sorted by expert."""
        pair_P = self._pair_P
        if pair_P is None:
            return self._orders
        parts = pair_P.split([len(order_N) for order_N in self._orders])
        return [pairs[order_N] for pairs, order_N in zip(parts, self._orders, strict=True)]


# Minimum mean length of runs of consecutive rows: finding shorter runs takes longer than copying row by row.
_MIN_RUN_LENGTH = 4


class SavedRows:
    """Rows saved per chunk by forward, for backward with a different number of chunks."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._row_chunks = list(parts)
        self._chunk_ends = torch.tensor([len(part) for part in parts], device="cpu").cumsum(0)

    @cached_property
    def _concatenated(self) -> Tensor:
        # A second copy of all chunks.
        return concat(self._row_chunks)

    def rows(self, index_R: Tensor) -> Tensor:
        """Copy the rows at these indices of the concatenated chunks."""
        if len(self._row_chunks) == 1 or index_R.is_cuda:
            return self._concatenated.index_select(0, index_R)
        # On CPUs, copy runs of consecutive rows directly from their chunks.
        part_R = torch.bucketize(index_R, self._chunk_ends, right=True)
        first = torch.ones_like(index_R, dtype=torch.bool)
        first[1:] = (index_R.diff() != 1) | (part_R.diff() != 0)
        begins = first.nonzero()[:, 0]
        if _MIN_RUN_LENGTH * len(begins) > len(index_R):
            return self._concatenated.index_select(0, index_R)
        lengths = torch.diff(begins, append=torch.tensor([len(index_R)], device="cpu")).tolist()
        runs = []
        for part, index, length in zip(part_R[begins].tolist(), index_R[begins].tolist(), lengths, strict=True):
            rows = self._row_chunks[part]
            runs.append(rows.narrow(0, index - int(self._chunk_ends[part]) + len(rows), length))
        return concat(runs) if len(runs) > 1 else torch.cat(runs or [self._row_chunks[0][:0]])


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dimension 0. Not differentiable. A single tensor is returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))
