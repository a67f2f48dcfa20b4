"""Lancet's partition and weight-gradient placement, against brute force and exact programs."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.policies.lancet_plans import (
    Gap,
    SplitRange,
    best_ranges,
    gaps_of,
    hidden_communication_s,
    place_exactly,
    place_greedily,
)
from fusedmoe.schedule.task import Task


def every_cut(count: int, parts: list[int], longest: int, start: int = 0):
    """Enumerate all partitions of `count` parts into ranges."""
    if start == count:
        yield ()
        return
    for stop in range(start + 1, min(count, start + longest) + 1):
        for k in parts:
            if k > 1 or stop == start + 1:
                for rest in every_cut(count, parts, longest, stop):
                    yield (SplitRange(start, stop, k), *rest)


def test_best_ranges_equal_brute_force():
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


def test_best_ranges_allow_no_split():
    assert best_ranges(2, lambda start, stop, k: float(k), [4], 2) == ((SplitRange(0, 1, 1), SplitRange(1, 2, 1)), 2.0)


def random_instance(rng: random.Random, layers: int) -> tuple[list[Gap], list[float]]:
    """A backward pass: two all-to-alls a layer, each followed by one to three weight gradients that may run from then
    on.
    """
    dispatch_s, combine_s = rng.uniform(0.5, 4.0), rng.uniform(0.5, 4.0)
    gaps_s = [rng.uniform(0.8, 1.2) * of for _ in range(layers) for of in (dispatch_s, combine_s)]
    first = [gap for gap in range(1, 2 * layers) for _ in range(rng.randint(1, 3))]
    seconds = [rng.uniform(0.2, 3.0) for _ in first]
    allowed = [{one for one, start in enumerate(first) if start <= gap} for gap in range(len(gaps_s))]
    return [Gap(*of) for of in zip(gaps_s, allowed, strict=True)], seconds


def brute_force_hidden_s(gaps: list[Gap], seconds: list[float]) -> float:
    choices = [[None, *(n for n, gap in enumerate(gaps) if one in gap.allowed)] for one in range(len(seconds))]
    return max(hidden_communication_s(gaps, seconds, placed) for placed in itertools.product(*choices))


def assert_allowed_placement(gaps, seconds, placed) -> None:
    assert len(placed) == len(seconds)
    assert all(number is None or one in gaps[number].allowed for one, number in enumerate(placed))


def test_exact_placement_equals_brute_force():
    rng = random.Random()
    for _ in range(15):
        gaps, seconds = random_instance(rng, 2)
        placed = place_exactly(gaps, seconds)
        assert_allowed_placement(gaps, seconds, placed)
        # The search rounds to fractions of the longest gap: each number is off by at most half a unit, in both
        # placements.
        off_s = (len(gaps) + len(seconds)) * max(gap.seconds for gap in gaps) / 2**12
        assert hidden_communication_s(gaps, seconds, placed) == pytest.approx(
            brute_force_hidden_s(gaps, seconds), abs=off_s
        )


def test_greedy_placement_is_near_exact():
    rng = random.Random(0)
    shares = []
    for _ in range(150):
        gaps, seconds = random_instance(rng, rng.randint(2, 4))
        greedy, best = place_greedily(gaps, seconds), place_exactly(gaps, seconds, limit=0.5)
        assert_allowed_placement(gaps, seconds, greedy)
        assert hidden_communication_s(gaps, seconds, greedy) <= hidden_communication_s(gaps, seconds, best)
        shares.append(hidden_communication_s(gaps, seconds, greedy) / hidden_communication_s(gaps, seconds, best))
    assert sum(shares) / len(shares) >= 0.97


def test_greedy_placement_of_worked_example():
    """The gap of 3.0 s takes 2.5 first (the best fit), then 0.6, which exceeds it; the gap of 2.0 takes the remaining
    1.9.
    """
    gaps = [Gap(3.0, {0, 1, 2}), Gap(2.0, {0, 1, 2})]
    assert place_greedily(gaps, [0.6, 1.9, 2.5]) == (0, 1, 0)
    assert hidden_communication_s(gaps, [0.6, 1.9, 2.5], (0, 1, 0)) == pytest.approx(3.0 + 1.9)
    assert place_greedily([Gap(1.0, set())], [1.0]) == (None,)
    assert place_greedily([], []) == ()


def test_gaps_exclude_dependencies_of_collective():
    """Dependencies and dependents of a collective do not overlap it."""
    kinds = ("dispatch", "expert", "combine", "attention")
    tasks = []
    for layer in (1, 0):
        for kind in kinds:
            tasks.append(Task(kind, 0, layer, "backward"))
            if kind in ("expert", "attention"):
                name = "weight-gradient" if kind == "expert" else "attention-weight-gradient"
                tasks.append(Task(name, 0, layer, "backward"))
    links, weights, gaps = gaps_of(tasks, dict.fromkeys(tasks, 1.0))
    assert [(task.kind, task.layer) for task in links] == [
        ("dispatch", 1),
        ("combine", 1),
        ("dispatch", 0),
        ("combine", 0),
    ]
    assert [(task.kind, task.layer) for task in weights] == [
        ("weight-gradient", 1),
        ("attention-weight-gradient", 1),
        ("weight-gradient", 0),
        ("attention-weight-gradient", 0),
    ]
    assert [set(gap.allowed) for gap in gaps] == [set(), {0}, {0, 1}, {0, 1, 2}]


def test_missing_or_tools_error_names_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'fusedmoe\[plan\]'"):
        place_exactly([Gap(1.0, {0})], [1.0])
