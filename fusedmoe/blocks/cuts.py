"""Where a batch is cut into micro-batches, and how the rows of several of them travel together as one chunk.

A plan may split a layer's dense part into other chunks than its experts' rows, and the forward pass into others than
the backward pass. The batch is therefore cut wherever any of them cuts it, and a chunk is some micro-batches that
follow each other. Cuts are fractions of the batch, so that there are as many micro-batches on every rank, some of them
empty where a rank has fewer samples. The backward pass takes chunks from the end (FlowMoE Eq. 5): there chunk 0 is the
last micro-batches. Worked example, 6 samples, 2 chunks forward and 3 backward: cuts at 0, 1/3, 1/2, 2/3, 1, so
micro-batches of samples 0–1, 2, 3 and 4–5; the forward chunks are micro-batches 0, 1 | 2, 3, the backward chunks
3 | 1, 2 | 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fusedmoe.autograd.moves import received_layout
from fusedmoe.comm.exchange import Part
from fusedmoe.engine.chunks import concatenated, taken
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.workspace import empty


@dataclass(frozen=True)
class Cuts:
    """Where a batch is cut. `shares`: where pieces begin, and the end, as shares of it."""

    shares: tuple[Fraction, ...]

    @classmethod
    def of(cls, counts: Iterable[int]) -> Cuts:
        """For equal chunks, so many at a time."""
        return cls(tuple(sorted({Fraction(i, count) for count in counts for i in range(count + 1)})))

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self.shares) - 1

    def chunk(self, chunk: int, count: int, phase: str) -> range:
        """The pieces of one of `count` chunks of a pass."""
        number = chunk if phase == "forward" else count - 1 - chunk
        return range(self.shares.index(Fraction(number, count)), self.shares.index(Fraction(number + 1, count)))

    def inside(self, other: Cuts, piece: int) -> range:
        """The pieces here that a piece of coarser cuts consists of."""
        return range(*(self.shares.index(other.shares[end]) for end in (piece, piece + 1)))

    def slice(self, pieces: range, size: int) -> slice:
        """Where some pieces are along an axis of so many elements."""
        return slice(*(int(size * self.shares[end]) for end in (pieces.start, pieces.stop)))


class Sent:
    """This rank's rows of a chunk, in the order in which they travel: by destination, piece and expert there.

    Args:
        layouts: of each piece, rows sorted by expert, without slack.
        peers: ranks that the experts are split over.
    Attributes:
        counts: of the rows by (peer, piece, its local expert), flat.
    """

    def __init__(self, layouts: Sequence[Layout], peers: int) -> None:
        self.layouts = layouts
        self._sizes = [layout.rows for layout in layouts]
        counts_pPE = torch.stack([layout.counts_E for layout in layouts]).view(len(layouts), peers, -1)
        self.counts = counts_pPE.transpose(0, 1).reshape(-1)
        self._order_N: Tensor | None = None
        if len(layouts) > 1:
            rows_pP = counts_pPE.sum(2)
            place_pP = (rows_pP.view(-1).cumsum(0) - rows_pP.view(-1)).view_as(rows_pP)
            self._order_N = _ranges(place_pP.t().reshape(-1), rows_pP.t().reshape(-1))

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Each piece's sorted rows -> all rows as they travel."""
        return rows[0] if self._order_N is None else taken(concatenated(rows), self._order_N)

    def split(self, rows: Tensor) -> list[Tensor]:
        """The inverse of `join`."""
        if self._order_N is None:
            return [rows]
        return list(empty(rows, rows.shape).index_copy_(0, self._order_N, rows).split(self._sizes))


class Received:
    """The rows of a chunk that come to the local experts: by source, piece and local expert.

    Args:
        part: the chunk's moves.
        counts_RpE: rows by source, piece and local expert.
    Attributes:
        layout: sorts them by local expert.
    """

    def __init__(self, part: Part, counts_RpE: Tensor) -> None:
        self.part, self.counts_RpE = part, counts_RpE
        self.layout = received_layout(counts_RpE.reshape(-1, counts_RpE.shape[2]), part.rows)

    def numbers(self, start_pRE: Tensor) -> Tensor:
        """[R]: the number of each row, where those of piece p, source r and expert e begin with start_pRE[p, r, e]."""
        return _ranges(start_pRE.transpose(0, 1).reshape(-1), self.counts_RpE.reshape(-1))


class Regrouped:
    """Where the rows of other chunks of the same pieces are among those of `chunks`, which have all pieces in order."""

    def __init__(self, chunks: Sequence[Received]) -> None:
        counts_pRE = torch.cat([chunk.counts_RpE.transpose(0, 1) for chunk in chunks])
        flat = counts_pRE.reshape(-1)
        self._start_pRE = (flat.cumsum(0) - flat).view_as(counts_pRE)
        numbers, sorted_places, start, piece = [], [], 0, 0
        for chunk in chunks:
            pieces = chunk.counts_RpE.shape[1]
            numbers.append(chunk.numbers(self._start_pRE[piece : piece + pieces]))
            sorted_places.append(start + chunk.layout.row_SK[:, 0])
            start, piece = start + chunk.part.rows, piece + pieces
        number_R = torch.cat(numbers)
        self._place_R = torch.empty_like(number_R)
        self._place_R[number_R] = torch.arange(len(number_R), device=number_R.device)
        self._sorted_place_R = torch.cat(sorted_places)

    def places(self, chunk: Received, first_piece: int) -> tuple[Tensor, Tensor]:
        """For the rows of a chunk that begins with this piece: as received, among received; sorted, among sorted."""
        pieces = slice(first_piece, first_piece + chunk.counts_RpE.shape[1])
        place = self._place_R[chunk.numbers(self._start_pRE[pieces])]
        return place, self._sorted_place_R[place[chunk.layout.pair_N]]


def counts_of(sizes_QPG: np.ndarray, pieces: int, held: int | None, device: torch.device) -> Tensor:
    """[R, pieces, e]: rows of a chunk by source, piece and local expert, from the sizes that an exchange agreed on.

    `held`: experts that this rank has, where others may have more.
    """
    shape = (sizes_QPG.shape[0] * sizes_QPG.shape[1], pieces, sizes_QPG.shape[2] // pieces)
    return torch.from_numpy(np.ascontiguousarray(sizes_QPG)).reshape(shape)[..., :held].to(device)


def _ranges(start_G: Tensor, count_G: Tensor) -> Tensor:
    """start, start + 1, … of each segment, one after the other."""
    before_G = count_G.cumsum(0) - count_G
    rows = int(count_G.sum())
    return torch.arange(rows, device=count_G.device) + torch.repeat_interleave(
        start_G - before_G, count_G, output_size=rows
    )
