from __future__ import annotations

import random

import pytest

from fusedmoe.schedule.lancet import SplitRange, best_ranges


def every_cut(count: int, parts: list[int], longest: int, start: int = 0):
    """All ways to cut `count` parts into ranges."""
    if start == count:
        yield ()
        return
    for stop in range(start + 1, min(count, start + longest) + 1):
        for k in parts:
            if k > 1 or stop == start + 1:
                for rest in every_cut(count, parts, longest, stop):
                    yield (SplitRange(start, stop, k), *rest)


def test_it_equals_brute_force():
    rng = random.Random()
    for _ in range(60):
        count, longest = rng.randint(0, 6), rng.randint(1, 4)
        parts = [1, *rng.sample([2, 3, 4, 8], rng.randint(0, 2))]
        seconds = {
            (start, stop, k): rng.random() * (stop - start)
            for start in range(count)
            for stop in range(start + 1, count + 1)
            for k in parts
        }
        ranges, total = best_ranges(count, lambda *of, seconds=seconds: seconds[of], parts, longest)
        best = min(sum(seconds[one] for one in cut) for cut in every_cut(count, parts, longest))
        assert total == pytest.approx(best) == pytest.approx(sum(seconds[one] for one in ranges))
        assert [place for one in ranges for place in range(one.start, one.stop)] == list(range(count))


def test_not_splitting_is_always_there():
    assert best_ranges(2, lambda start, stop, k: float(k), [4], 2) == ((SplitRange(0, 1, 1), SplitRange(1, 2, 1)), 2.0)
