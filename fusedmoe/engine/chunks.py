"""Chunks: which rows of a layer go when.

Rows lie in segments, one for each expert, and go in r chunks with a share of every segment in each. A segment's n rows
are split as `comm.exchange.share` does: chunk i has rows ⌊n·i/r⌋ to ⌊n·(i+1)/r⌋. Nothing is padded: what a row meets
on its way does not depend on r. Worked example, segments of 3 and 2 rows a b c | d e, two chunks: a d | b c e. The
order is [0, 3, 1, 2, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.kernels.gather_sum import put_pairs
from fusedmoe.kernels.layout import Layout, sort_received


def chunk_order(counts_G: Tensor, rows: int, degree: int) -> Tensor:
    """[rows] int64: the rows (numbered along the segments) in the order in which they go.

    Args:
        counts_G: rows of each segment.
        rows: their sum.
    """
    row_N = torch.arange(rows, device=counts_G.device)
    segment_N = torch.repeat_interleave(counts_G, output_size=rows)
    first_G = counts_G.cumsum(0) - counts_G
    # The chunk of the t-th of n rows is the last i with ⌊n·i/r⌋ ≤ t.
    chunk_N = ((row_N - first_G[segment_N] + 1) * degree - 1) // counts_G[segment_N].clamp(min=1)
    return chunk_N.sort(stable=True).indices


def inverse(order_N: Tensor) -> Tensor:
    """Returns the place of each row in an order."""
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return place_N


def in_chunks(layout: Layout, order_N: Tensor) -> Layout:
    """Returns the layout of the same rows in another order (its counts and offsets still speak of the old one)."""
    place_N = inverse(order_N)
    row_SK = torch.where(layout.row_SK < 0, -1, place_N[layout.row_SK.clamp(min=0)]) if len(place_N) else layout.row_SK
    source_N = order_N if layout.source_N is None else layout.source_N[order_N]
    return replace(layout, source_N=source_N, pair_N=layout.pair_N[order_N], row_SK=row_SK)


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
        self.received = [sort_received(part.counts_RE, part.rows) for part in self.parts]
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
        """Finds for each chunk here where its received rows are among all of `others`, as received and as sorted."""
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


# Runs of fewer rows take longer to find than to copy.
_SHORT = 4


class Kept:
    """Rows that chunks have kept, for chunks of another number."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    @cached_property
    def _whole(self) -> Tensor:
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
        lengths = torch.diff(begins, append=torch.tensor([len(index_R)])).tolist()
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
