"""The size of gradient buckets, chosen by step time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bench.simulate.grid import workloads
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.training.plan_tuning import BucketSearch


def random_setting(rng: random.Random) -> tuple[int, Callable[[int], float]]:
    """The largest gradient of a layer, and the step time as a function of S_p."""
    testbed = TESTBEDS[rng.choice(list(TESTBEDS))]
    shape = replace(rng.choice(list(workloads(testbed))), ep=rng.choice([1, 8]), esp=rng.choice([1, 4]))
    line = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8.5))
    costs = StepCosts((shape.layer_costs(testbed.costs),) * 4, line)
    degree = rng.choice([2, 4])

    def step_s(bucket_bytes: int) -> float:
        return micro_schedule(costs, StepSplit(degree, degree, bucket_bytes)).makespan_s(costs.contention)

    return max(costs.gradient_bytes), step_s


def run_search(search: BucketSearch, step_s: Callable[[int], float]) -> int:
    """The best of the tried sizes."""
    while (size := search.next()) is not None:
        search.tried.append((size, step_s(size)))
    return min(search.tried, key=lambda one: one[1])[0]


@pytest.mark.parametrize("settings", [1, pytest.param(47, marks=pytest.mark.slow)])
def test_eight_samples_are_within_5_percent_of_sweep(settings: int) -> None:
    rng = random.Random()
    for _ in range(settings):
        largest, step_s = random_setting(rng)
        search = BucketSearch(largest, seed=rng.randrange(2**31))
        chosen = run_search(search, step_s)
        assert len(search.tried) == 8
        best = min(step_s(int(size)) for size in np.geomspace(largest / 64, largest, 24))
        assert step_s(chosen) <= 1.05 * best, (search.tried, best)


def test_equal_seeds_try_equal_sizes() -> None:
    searches = [BucketSearch(12345, seed=3) for _ in range(2)]
    for search in searches:
        run_search(search, lambda size: size % 97)
    assert searches[0].tried == searches[1].tried


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_search_of_tiny_gradients(largest: int) -> None:
    assert 1 <= run_search(BucketSearch(largest), float) <= largest


@pytest.mark.parametrize("wrong", [{"largest_bytes": 0}, {"samples": 0}])
def test_bucket_search_rejects_invalid_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="S_p"):
        BucketSearch(**{"largest_bytes": 10, **wrong})


def test_missing_scikit_learn_raises_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedmoe.training.plan_tuning.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="scikit-learn"):
        BucketSearch(1000)
