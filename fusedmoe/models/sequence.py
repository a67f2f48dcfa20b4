"""How the positions of a replica's sequences are split over its MP group between the attentions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmoe.autograd.parallel import split_counts
from fusedmoe.comm.topology import Topology


@dataclass(frozen=True)
class TokenSplit:
    """Sequences of L positions, of each of which every MP rank has the same slice, as `torch.chunk` would split L.

    Any number of samples can be split so, some of a batch (a micro-batch) as well as all: rank m's rows are those of
    [B, P_m, M], sample by sample, so that some samples are a slice of them.

    Worked example: L = 5, three ranks: lengths (2, 2, 1), the second rank holds positions 2 and 3 of every sample.
    Ranks may be left without positions: L = 5, four ranks: lengths (2, 2, 1, 0).

    Attributes:
        length: L.   lengths: positions of each MP rank.   start, stop: this rank's positions.
    """

    length: int
    lengths: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, length: int, topology: Topology) -> TokenSplit:
        lengths = split_counts(length, topology.mp)
        start = sum(lengths[: topology.mp.index])
        return cls(length, tuple(lengths), start, start + lengths[topology.mp.index])

    def rows(self, samples: int) -> list[int]:
        """Rows of each MP rank of so many samples."""
        return [samples * length for length in self.lengths]

    def by_sample(self, rows_TM: Tensor, samples: int) -> Tensor:
        """Rows as the ranks have them, rank after rank (after a gather) -> [samples, L, M].

        Copies once, and nothing where the two orders are the same: of one rank or one sample.
        """
        if len(self.lengths) == 1 or samples == 1:
            return rows_TM.view(samples, self.length, rows_TM.shape[-1])
        parts = rows_TM.split(self.rows(samples))
        shaped = (part.view(samples, n, part.shape[-1]) for part, n in zip(parts, self.lengths, strict=True))
        return torch.cat(list(shaped), dim=1)

    def by_rank(self, y_BLM: Tensor) -> Tensor:
        """The other way: [samples, L, M] -> rows in the order of the ranks (before a reduce-scatter)."""
        if len(self.lengths) == 1 or len(y_BLM) == 1:
            return y_BLM.flatten(0, 1)
        return torch.cat([part.flatten(0, 1) for part in y_BLM.split(self.lengths, dim=1)])
