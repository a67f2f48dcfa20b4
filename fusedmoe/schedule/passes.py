"""How long one layer's pass takes, in closed form, and the least that it can take.

D, AG, X, RS, C are the seconds of one chunk's dispatch, all-gather, expert, reduce-scatter and combine, gar those of
the gradient all-reduces in the middle; `orders.py` says in which order they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fusedmoe.schedule.chunks import Chunks
from fusedmoe.schedule.task import PIPELINE


class ChunkTimes(NamedTuple):
    """Seconds of each part of one chunk. A part that a layer does not have takes none."""

    dispatch: float = 0.0
    all_gather: float = 0.0
    expert: float = 0.0
    reduce_scatter: float = 0.0
    combine: float = 0.0


def chunk_times(chunks: Mapping[str, Chunks], degree: int) -> ChunkTimes:
    """The times of one of `degree` chunks of a layer's pass (F9)."""
    return ChunkTimes(*(chunks[kind].seconds(degree) if kind in chunks else 0.0 for kind in PIPELINE))


def three_queues_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """T(r) of `orders.three_queues` without contention: exact for any times (F11).

    The pass takes as long as the longest path through its tasks, along chunks and along resources. A path has r − 1
    steps from a chunk to the next, all on the resource whose task is longest; only the path through gar, and the one
    that goes from the last all-gather to the first reduce-scatter, walk through the chunks twice.
    """
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(
        r * (d + c) + gar,
        chain + (r - 1) * (max(d, ag) + max(rs, c)),
        chain + x + (r - 1) * max(d, ag, x, rs, c),
    )


def one_queue_s(r: int, times: ChunkTimes, gar: float = 0.0) -> float:
    """T(r) of `orders.one_queue`: exact for any times, by the same argument. Nothing there can contend."""
    d, ag, x, rs, c = times
    chain = d + ag + rs + c
    return max(r * chain + gar, chain + x + (r - 1) * max(d + ag, x, rs + c))


def pass_bound_s(r: int, times: ChunkTimes, gar: float = 0.0, contention: float = 1.0) -> float:
    """Seconds that no order beats: what each resource has to do, with what must come before and after it.

    Before the first dispatch has ended and after the last reduce-scatter the links inside the node have nothing to do.
    """
    d, ag, x, rs, c = times
    return max(
        d + ag + r * x + rs + c,
        d + links_bound_s((r - 1) * (d + c) + gar, r * (ag + rs), contention) + c,
    )


def links_bound_s(inter: float, intra: float, contention: float) -> float:
    """The least time for the work of both links. While they work together, each goes on at `contention` of its speed.

    Below a contention of one half they had better take turns.
    """
    less, more = sorted((inter, intra))
    return more + less * min(1.0, (1 - contention) / contention)
