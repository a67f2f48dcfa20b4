"""Cuts of a batch into micro-batches, and chunks: the rows of some micro-batches that travel together.

A plan may split a block's dense part (attention) into other chunks than its experts' rows, and the forward pass into
others than the backward pass. The batch is therefore cut into *dense micro-batches* wherever one of the passes cuts the
dense part, and these into *row micro-batches* wherever one of them cuts the rows; a chunk is some micro-batches that
follow each other. Cuts are fractions of the batch, so that there are as many micro-batches on every rank, some of them
empty where a rank has fewer samples. The backward pass takes chunks from the end (FlowMoE Eq. 5): there chunk 0 is the
last micro-batches.

Worked example, 6 samples, rows in 2 chunks forward and 3 backward, dense parts in one: cuts at 0, 1/3, 1/2, 2/3, 1, so
the row micro-batches are samples 0–1, 2, 3 and 4–5. The forward chunks are micro-batches 0, 1 | 2, 3, the backward
chunks 3 | 1, 2 | 0. The one dense micro-batch has all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedmoe.autograd.moves import received_layout
from fusedmoe.comm.exchange import Part
from fusedmoe.engine.chunks import concatenated, taken
from fusedmoe.engine.run import Plans
from fusedmoe.kernels.layout import Layout
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, TaskKind

#: Indexes a batch, [B, …, M]: all before the axis that is cut, and a slice of that.
Index = tuple[slice, ...]


class BlockDegrees(NamedTuple):
    """Numbers of chunks in which the plans of both passes have each part of a block.

    Attributes:
        dense, rows: chunks of the dense part and of the experts' rows, forward and backward.
        permutes: a task of its own says when rows are given their places.
        later: the dense part's weight gradients are tasks of their own.
        dense_tasks: tasks of the dense part in the backward plan, its weight gradients among them.
    """

    dense: tuple[int, int]
    rows: tuple[int, int]
    permutes: bool
    later: bool
    dense_tasks: int


def degrees_of(plans: Plans, block: int) -> BlockDegrees:
    """Reads the degrees of one block off the plans of both passes."""
    counts = [Counter(task.kind for task in plan if task.layer == block) for plan in (plans.forward, plans.backward)]
    dense_forward, dense_backward = (count[TaskKind.ATTENTION] or 1 for count in counts)
    # All parts of a block's pipeline have as many chunks, but which parts there are depends on the ranks.
    rows_forward, rows_backward = (max(count[kind] for kind in PIPELINE) or 1 for count in counts)
    weights = counts[1][WEIGHT_GRADIENTS[TaskKind.ATTENTION]]
    return BlockDegrees(
        (dense_forward, dense_backward),
        (rows_forward, rows_backward),
        counts[0][TaskKind.PERMUTE] > 0,
        weights > 0,
        counts[1][TaskKind.ATTENTION] + weights,
    )


@dataclass(frozen=True, eq=False)
class BlockCuts:
    """Places of one block's cuts in a batch.

    Attributes:
        dense_at, rows_at: where each dense and each row micro-batch is in the batch.
        rows_in_dense_at: where each row micro-batch is in its dense one.
        dense_of: the dense micro-batch of each row micro-batch.
        rows_of: the row micro-batches of each dense one.
        dense_chunks, row_chunks: for "forward" and "backward" the micro-batches of each chunk.
    """

    dense_at: list[Index]
    rows_at: list[Index]
    rows_in_dense_at: list[Index]
    dense_of: list[int]
    rows_of: list[range]
    dense_chunks: dict[str, list[range]]
    row_chunks: dict[str, list[range]]


# A training run has a few plans and batch sizes, and asks for the same cuts in every step.
@lru_cache(maxsize=256)
def cut(dense: tuple[int, int], rows: tuple[int, int], axis: int, size: int) -> BlockCuts:
    """Cuts a batch that has `size` elements along `axis`, for these degrees of dense parts and rows."""
    dense_ends, row_ends = _ends(dense), _ends((*dense, *rows))
    # Rows are cut wherever a dense part is, so that each row micro-batch lies in one dense micro-batch.
    rows_of = _between(dense_ends, row_ends)
    dense_of = [place for place, inside in enumerate(rows_of) for _ in inside]
    # Fractions are rounded down to elements, the same way for both kinds of cuts.
    starts = [int(size * end) for end in dense_ends]
    return BlockCuts(
        _indices(dense_ends, axis, size),
        _indices(row_ends, axis, size),
        [
            (slice(None),) * axis + (slice(int(size * begin) - starts[place], int(size * end) - starts[place]),)
            for place, begin, end in zip(dense_of, row_ends[:-1], row_ends[1:], strict=True)
        ],
        dense_of,
        rows_of,
        {  # the backward pass begins at the end
            "forward": _between(_ends(dense[:1]), dense_ends),
            "backward": _between(_ends(dense[1:]), dense_ends)[::-1],
        },
        {"forward": _between(_ends(rows[:1]), row_ends), "backward": _between(_ends(rows[1:]), row_ends)[::-1]},
    )


def _ends(counts: Iterable[int]) -> list[Fraction]:
    """Lists where equal chunks begin, so many at a time, and the end, as fractions of a batch."""
    # Fractions, since 1/3 of one count must be equal to 2/6 of another.
    return sorted({Fraction(i, count) for count in counts for i in range(count + 1)})


def _between(coarse: list[Fraction], fine: list[Fraction]) -> list[range]:
    """Finds for each interval of coarser ends the intervals of finer ends in it."""
    return [range(fine.index(start), fine.index(end)) for start, end in zip(coarse[:-1], coarse[1:], strict=True)]


def _indices(ends: list[Fraction], axis: int, size: int) -> list[Index]:
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return [(slice(None),) * axis + (slice(int(size * start), int(size * end)),) for start, end in pairs]


class MicroBatch:
    """A micro-batch, or a whole batch: which one it is, and which of its tokens this rank routes.

    Ranks of an MP group that have the same tokens route a slice of them each, first that of rank 0.

    Attributes:
        number, count: which it is, of how many.
        lead: the shape of its tokens, [b, …].
        rows: tokens that each rank routes; one number where no other rank has the same tokens.
        own: where this rank's tokens are among all of them.
    """

    def __init__(self, number: int, count: int, lead: torch.Size, rows: Sequence[int], rank: int) -> None:
        self.number, self.count, self.lead, self.rows, self.rank = number, count, lead, rows, rank
        start = sum(rows[:rank])
        self.own = slice(start, start + rows[rank])

    def batch(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """[S, …] values of this rank's tokens -> [b, …, ·], with `fill` for tokens of other ranks."""
        value_S = own_S if len(self.rows) == 1 else self.spread(own_S, fill)
        return value_S.view(*self.lead, *value_S.shape[1:])

    def spread(self, own_S: Tensor, fill: int = 0) -> Tensor:
        """Values of this rank's tokens -> values of all tokens, with `fill` for those of other ranks."""
        tokens, at = sum(self.rows), self.own
        if len(own_S) == tokens:
            return own_S
        before, after = (own_S.new_full((n, *own_S.shape[1:]), fill) for n in (at.start, tokens - at.stop))
        return torch.cat([before, own_S, after])


class Sent:
    """This rank's rows of a chunk, in the order in which they travel: by destination, micro-batch and expert there.

    Args:
        layouts: of each row micro-batch, rows sorted by expert, without slack.
        peers: ranks that the experts are split over.
    Attributes:
        counts: rows by (peer, micro-batch, its local expert), flat.
    """

    def __init__(self, layouts: Sequence[Layout], peers: int) -> None:
        self._order_N: Tensor | None = None
        if len(layouts) == 1:  # rows are in that order already
            self.counts = layouts[0].counts_E
            return
        # The rows lie by (micro-batch, peer, expert); they travel by (peer, micro-batch, expert), so that what goes to
        # one rank lies together.
        self._sizes = [layout.rows for layout in layouts]
        counts_pPE = torch.stack([layout.counts_E for layout in layouts]).view(len(layouts), peers, -1)
        self.counts = counts_pPE.transpose(0, 1).reshape(-1)
        rows_pP = counts_pPE.sum(2)
        place_pP = (rows_pP.view(-1).cumsum(0) - rows_pP.view(-1)).view_as(rows_pP)
        self._order_N = _ranges(place_pP.t().reshape(-1), rows_pP.t().reshape(-1))

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Each micro-batch's sorted rows -> all rows as they travel."""
        return rows[0] if self._order_N is None else taken(concatenated(rows), self._order_N)

    def split(self, rows: Tensor) -> list[Tensor]:
        """All rows as they travel -> each micro-batch's sorted rows."""
        if self._order_N is None:
            return [rows]
        return list(rows.new_empty(rows.shape).index_copy_(0, self._order_N, rows).split(self._sizes))


class Received:
    """The rows of a chunk that come to the local experts: by source, micro-batch and local expert.

    Args:
        part: the chunk's moves.
        sizes_QPG: rows of the chunk by sharding peer, source rank, and (micro-batch, local expert), as ranks agreed.
        micro_batches: how many there are.
        held: experts that this rank has, where others may have more; None: as many as every other.
        device: where the rows are.
    Attributes:
        counts_RpE: rows by source, micro-batch and local expert.
        layout: sorts the rows by local expert.
    """

    def __init__(
        self, part: Part, sizes_QPG: np.ndarray, micro_batches: int, held: int | None, device: torch.device
    ) -> None:
        shape = (sizes_QPG.shape[0] * sizes_QPG.shape[1], micro_batches, sizes_QPG.shape[2] // micro_batches)
        counts_RpE = torch.from_numpy(np.ascontiguousarray(sizes_QPG)).reshape(shape)[..., :held]
        self.part, self.counts_RpE = part, counts_RpE.to(device)
        self.layout = received_layout(self.counts_RpE.reshape(-1, self.counts_RpE.shape[2]), part.rows)

    def numbers(self, start_pRE: Tensor) -> Tensor:
        """[R]: the number of each row, where those of micro-batch p, source r and expert e begin with
        start_pRE[p, r, e]."""
        return _ranges(start_pRE.transpose(0, 1).reshape(-1), self.counts_RpE.reshape(-1))


class Regrouped:
    """Finds the rows of other chunks of the same micro-batches among those of `chunks`, which have all in order.

    Every row has a number by micro-batch, source and local expert, the same whatever the chunks.
    """

    def __init__(self, chunks: Sequence[Received]) -> None:
        counts_pRE = torch.cat([chunk.counts_RpE.transpose(0, 1) for chunk in chunks])
        flat = counts_pRE.reshape(-1)
        self._start_pRE = (flat.cumsum(0) - flat).view_as(counts_pRE)
        numbers, sorted_places, start, first = [], [], 0, 0
        for chunk in chunks:
            after = first + chunk.counts_RpE.shape[1]
            numbers.append(chunk.numbers(self._start_pRE[first:after]))
            sorted_places.append(start + chunk.layout.row_SK[:, 0])
            start, first = start + chunk.part.rows, after
        # The inverse: where the row with each number is.
        number_R = torch.cat(numbers)
        self._place_R = torch.empty_like(number_R)
        self._place_R[number_R] = torch.arange(len(number_R), device=number_R.device)
        self._sorted_place_R = torch.cat(sorted_places)

    def places(self, chunk: Received, first: int) -> tuple[Tensor, Tensor]:
        """Finds the rows of a chunk that begins with micro-batch `first`: as received, among received; sorted, among
        sorted."""
        place = self._place_R[chunk.numbers(self._start_pRE[first : first + chunk.counts_RpE.shape[1]])]
        return place, self._sorted_place_R[place[chunk.layout.pair_N]]


def _ranges(start_G: Tensor, count_G: Tensor) -> Tensor:
    """start, start + 1, … of each segment, one after the other."""
    before_G = count_G.cumsum(0) - count_G
    rows = int(count_G.sum())
    return torch.arange(rows, device=count_G.device) + torch.repeat_interleave(
        start_G - before_G, count_G, output_size=rows
    )
