"""What chunks of a part of a layer take, and what they keep busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusedmoe.schedule.task import LINKS
from fusedmoe.schedule.timeline import RESOURCES


@dataclass(frozen=True)
class Chunks:
    """Each of r chunks takes alpha_s + whole_s/r seconds."""

    alpha_s: float
    whole_s: float

    def seconds(self, degree: int) -> float:
        return self.alpha_s + self.whole_s / degree

    def __add__(self, other: Chunks) -> Chunks:
        """One after the other."""
        return Chunks(self.alpha_s + other.alpha_s, self.whole_s + other.whole_s)

    def __mul__(self, times: float) -> Chunks:
        return Chunks(self.alpha_s * times, self.whole_s * times)


def work_s(parts: Mapping[str, Chunks], degree: int = 1) -> dict[str, float]:
    """What each resource has to do for all chunks of parts by kind, in seconds."""
    found = dict.fromkeys(RESOURCES, 0.0)
    for kind, part in parts.items():
        found[LINKS.get(kind, "compute")] += degree * part.seconds(degree)
    return found
