"""Who keeps what: of each part of a job's state at least two nodes have a copy, as long as there are two nodes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class JobNodes:
    """The ranks of a job by node: `of_rank[r]` is the number of rank r's node, from 0."""

    of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> JobNodes:
        """From the name of each rank's node, in rank order."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, of in enumerate(self.of_rank) if of == node]

    def speaks(self, rank: int) -> bool:
        """Whether a rank does what is done once on each node."""
        return self.ranks(self.of_rank[rank])[0] == rank

    def keeps(self, key: str, holders: Sequence[int], rank: int) -> bool:
        """Whether `rank`, one of the holders of `key`, is the one that keeps it on its node: memory is the node's."""
        here = [other for other in sorted(holders) if self.of_rank[other] == self.of_rank[rank]]
        return here[zlib.crc32(key.encode()) % len(here)] == rank

    def on_one(self, holders: Sequence[int]) -> bool:
        """Whether all holders are on one node, with which the part would be lost."""
        return len({self.of_rank[rank] for rank in holders}) == 1

    def buddy(self, rank: int) -> int | None:
        """The rank that gets copies of what only the node of `rank` has: on the next node, the same place there; None
        where there is one node."""
        if self.count == 1:
            return None
        own, next_ones = self.ranks(self.of_rank[rank]), self.ranks((self.of_rank[rank] + 1) % self.count)
        return next_ones[own.index(rank) % len(next_ones)]

    def sources(self, rank: int) -> list[int]:
        """The ranks whose buddy is `rank`."""
        return [other for other in range(len(self.of_rank)) if self.buddy(other) == rank]
