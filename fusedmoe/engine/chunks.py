"""Chunks: which tokens of a layer go when.

Tokens lie in segments, one for each destination, and go in r chunks with a share of every segment in each, so that all
(token, k) pairs of a token on a rank are in one chunk. (Rows that are tokens of their own lie by expert, and have a
segment for each.) A segment's n tokens are split as `comm.exchange.share` does: chunk i has ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋.
Nothing is padded, and what a token meets on its way does not depend on r. Worked example, segments of 3 and 2 tokens
a b c | d e, two chunks: a d | b c e. The order is [0, 3, 1, 2, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import block_order
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.kernels.deduplicate import Received, inverse
from fusedmoe.kernels.layout import Layout


def in_chunks(layout: Layout, order_N: Tensor) -> Layout:
    """Returns the layout of the same rows in another order (its counts and offsets still speak of the old one)."""
    place_N = inverse(order_N)
    # Pairs that were dropped have no row in any order.
    row_SK = torch.where(layout.row_SK < 0, -1, place_N[layout.row_SK.clamp(min=0)]) if len(place_N) else layout.row_SK
    source_N = order_N if layout.source_N is None else layout.source_N[order_N]
    return replace(layout, source_N=source_N, pair_N=layout.pair_N[order_N], row_SK=row_SK)


class RowChunks:
    """The tokens of a call in chunks: what this rank sends, and what it receives.

    Args:
        exchange: of all tokens.   tokens: sorts those that are sent (`Sending`).   pairs: of those received.
        k: the most pairs of a token.
    Attributes:
        parts: the collectives of each chunk.
        layout: sorts the tokens sent, in chunk order.
        received: sorts each chunk's received tokens by local expert.
    """

    def __init__(self, exchange: Exchange, tokens: Layout, pairs: Received, k: int, degree: int) -> None:
        self.layout = tokens
        self.parts: list[Part] = [exchange]
        # Of each token and pair received, in chunk order, its number without chunks; None: chunk order is that order.
        self._token_R: Tensor | None = None
        self._pair_P: Tensor | None = None
        chunks = [pairs]
        if degree > 1:
            cut, device = exchange.cut(degree), tokens.pair_N.device
            self.parts = cut.parts
            self.layout = in_chunks(tokens, block_order(cut.sent_Gi, (1, 0), device))
            self._token_R = block_order(cut.come_Gi, (1, 0), device)
            self._pair_P, chunks = pairs.in_chunks(self._token_R, [part.rows for part in self.parts])
        rows = [part.rows for part in self.parts]
        experts = exchange.experts
        sorted_chunks = [chunk.sort(count, experts, k) for chunk, count in zip(chunks, rows, strict=True)]
        self.received = [layout for layout, _ in sorted_chunks]
        self._orders = [order_N for _, order_N in sorted_chunks]

    def split(self, value_P: Tensor) -> list[Tensor]:
        """Values of received pairs, numbered without chunks -> those of each chunk, sorted by expert."""
        in_order = value_P if self._pair_P is None else value_P[self._pair_P]
        parts = in_order.split([len(order_N) for order_N in self._orders])
        return [value[order_N] for value, order_N in zip(parts, self._orders, strict=True)]

    def join(self, value_parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        pairs = zip(value_parts, self._orders, strict=True)
        in_order = concatenated([torch.empty_like(value).index_copy_(0, order_N, value) for value, order_N in pairs])
        return in_order if self._pair_P is None else torch.empty_like(in_order).index_copy_(0, self._pair_P, in_order)

    def rows_of(self, others: RowChunks) -> list[tuple[Tensor, Tensor]]:
        """Finds for each chunk here where its rows are among all of `others`: tokens as received, and pairs sorted."""
        # By numbers without chunks, which both have: ranks need not tell each other anything.
        token_R, sorted_P = inverse(concatenated(others.tokens())), inverse(concatenated(others.sorted_pairs()))
        numbers = zip(self.tokens(), self.sorted_pairs(), strict=True)
        return [(token_R[tokens], sorted_P[pairs]) for tokens, pairs in numbers]

    def tokens(self) -> Sequence[Tensor]:
        """Tokens of each chunk, numbered without chunks."""
        rows = [part.rows for part in self.parts]
        token_R = self._token_R
        if token_R is None:
            token_R = torch.arange(sum(rows), device=self._orders[0].device)
        return token_R.split(rows)

    def sorted_pairs(self) -> Sequence[Tensor]:
        """Pairs of each chunk, sorted by expert, numbered without chunks."""
        pair_P = self._pair_P
        if pair_P is None:
            return self._orders
        parts = pair_P.split([len(order_N) for order_N in self._orders])
        return [pairs[order_N] for pairs, order_N in zip(parts, self._orders, strict=True)]


# Runs of fewer rows take longer to find than to copy.
_SHORT = 4


class Kept:
    """Rows that chunks have kept, for chunks of another number."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        self._ends = torch.tensor([len(part) for part in parts], device="cpu").cumsum(0)

    @cached_property
    def _whole(self) -> Tensor:
        # Only where runs are short: it takes the memory of all chunks a second time.
        return concatenated(self._parts)

    def rows(self, index_R: Tensor) -> Tensor:
        """A copy of those with these numbers, along all parts."""
        if len(self._parts) == 1 or index_R.is_cuda:
            return taken(self._whole, index_R)
        # A CPU copies runs of rows from where they are, once.
        part_R = torch.bucketize(index_R, self._ends, right=True)
        first = torch.ones_like(index_R, dtype=torch.bool)
        first[1:] = (index_R.diff() != 1) | (part_R.diff() != 0)
        begins = first.nonzero()[:, 0]
        if _SHORT * len(begins) > len(index_R):
            return taken(self._whole, index_R)
        lengths = torch.diff(begins, append=torch.tensor([len(index_R)], device="cpu")).tolist()
        runs = []
        for part, index, length in zip(part_R[begins].tolist(), index_R[begins].tolist(), lengths, strict=True):
            rows = self._parts[part]
            runs.append(rows.narrow(0, index - int(self._ends[part]) + len(rows), length))
        return concatenated(runs) if len(runs) > 1 else torch.cat(runs or [self._parts[0][:0]])


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a batch, not differentiable; one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))


def taken(rows: Tensor, index_N: Tensor) -> Tensor:
    """Copies the rows with these numbers; not differentiable."""
    return torch.index_select(rows, 0, index_N)
