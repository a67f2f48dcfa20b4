"""How the tokens of a replica's batch are split over its MP group between the attentions."""

from __future__ import annotations

from dataclasses import dataclass

from fusedmoe.autograd.parallel import split_counts
from fusedmoe.comm.topology import Topology


@dataclass(frozen=True)
class TokenSplit:
    """A batch of B sequences of L tokens as B·L rows, rank by rank of the MP group as `torch.chunk` would.

    Worked example: B = 1, L = 5, three ranks: counts (2, 2, 1), the second rank holds rows 2 and 3. Ranks may be left
    without rows.

    Attributes:
        batch, length: B and L.   counts: rows of each MP rank.   start, stop: this rank's rows.
    """

    batch: int
    length: int
    counts: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, batch: int, length: int, topology: Topology) -> TokenSplit:
        counts = split_counts(batch * length, topology.mp)
        start = sum(counts[: topology.mp.index])
        return cls(batch, length, tuple(counts), start, start + counts[topology.mp.index])
