"""Which consecutive parts of a pass go in micro-batches, and in how many (Lancet §5, the dynamic programme)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """Parts `start` to `stop` (without it) in `parts` micro-batches; 1: not split."""

    start: int
    stop: int
    parts: int


def best_ranges(
    count: int, seconds: Callable[[int, int, int], float], parts: Iterable[int], longest: int
) -> tuple[tuple[Range, ...], float]:
    """T(n) = min over i and k of T(i) + P(i, n, k): the best way to cut `count` parts into ranges, and its seconds.

    Args:
        seconds: P(start, stop, k), of a range by itself.
        parts: the k to try.
        longest: the most parts of a range; a part that is not split is a range by itself.
    """
    choices = sorted(set(parts) | {1})
    total = [0.0]
    last: list[Range] = []
    for stop in range(1, count + 1):
        found = []
        for start in range(max(0, stop - longest), stop):
            for k in choices:
                if k > 1 or start == stop - 1:
                    found.append((total[start] + seconds(start, stop, k), Range(start, stop, k)))
        best = min(found)
        total.append(best[0])
        last.append(best[1])
    ranges: list[Range] = []
    stop = count
    while stop:
        ranges.append(last[stop - 1])
        stop = last[stop - 1].start
    return tuple(reversed(ranges)), total[count]
