"""Roads: the kinds of tasks that a chunk goes through in a layer's pass, by collectives or with a fused operation."""

from __future__ import annotations

from collections.abc import Mapping

from fusedmoe.schedule.fused import Chunks, TiledChunks
from fusedmoe.schedule.task import FUSED, LINKS
from fusedmoe.schedule.timeline import RESOURCES

#: What each kind on the way takes, in the order of the way.
Road = Mapping[str, Chunks | TiledChunks]


def kind_times(road: Road, degree: int) -> dict[str, float]:
    """Seconds of one of `degree` chunks, by kind."""
    return {kind: part.seconds(degree) for kind, part in road.items()}


def is_fused(road: Road) -> bool:
    """Whether one of the kinds is a fused operation."""
    return not FUSED.keys().isdisjoint(road)


def work_s(road: Road, degree: int = 1) -> dict[str, float]:
    """What the resources have to do for all chunks, in seconds; of a fused operation links, while rows are on them."""
    found = dict.fromkeys(RESOURCES, 0.0)
    for kind, part in road.items():
        found[LINKS.get(kind, "compute")] += degree * part.seconds(degree)
        if isinstance(part, TiledChunks):
            for link, use in part.overlap(degree).links.items():
                found[link] += degree * use.work_s
    return found
