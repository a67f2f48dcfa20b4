"""The size of buckets, found by step time; with an S_p that changes between steps nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.grid import TESTBEDS, workloads
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import StepSplit, micro_schedule
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.training import plan_step, sync_gradients
from fusedmoe.training.step_plan import BucketTuner, BucketTuning, blocks_costs
from tests.cluster import Cluster
from tests.layers.test_pipeline import L, M, make_blocks
from tests.layers.test_pipeline_plans import COSTS, workload


def tune(rank: int, world: int) -> list[int]:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    blocks = make_blocks("topk", 2, None, topology)
    run = fusedmoe.pipeline(blocks)
    costs = replace(COSTS, lines={**COSTS.lines})
    plan, buckets = plan_step(run, topology, "flowmoe", costs, workload(topology, 2), limit=4)
    step = blocks_costs(run, costs, workload(topology, 2), buckets)
    tuning = BucketTuning(run, buckets, step, plan, samples=4, steps=1)
    sizes, gradients = [], []
    for _ in range(6):
        sizes.append(max(task.size or 0 for task in tuning.plan.inter if task.kind == "gradient-all-reduce"))
        torch.manual_seed(rank)
        buckets.open()
        run(torch.randn(4, L, M, dtype=torch.double)).square().sum().backward()
        sync_gradients(run, topology, buckets=buckets)
        gradients.append([None if p.grad is None else p.grad.clone() for p in run.parameters()])
        run.zero_grad()
        # As simulated, and on one rank longer: the longest counts.
        tuning.note(makespan(tuning.plan, step) * (1 + rank))
    for one, other in zip(gradients[0], gradients[-1], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert tuning.tuner.settled and len(set(sizes)) >= 4, (sizes, tuning.tuner.tried)
    return [tuning.tuner.bucket_bytes, *sizes]


def test_sizes_are_tried_and_the_best_is_kept(cluster: Cluster) -> None:
    pytest.importorskip("sklearn")
    first, second = cluster.run(2, tune)
    assert first == second


def random_setting(rng: random.Random) -> tuple[int, Callable[[int], float]]:
    """The largest gradient of a layer, and what a step takes by S_p."""
    testbed = TESTBEDS[rng.choice(list(TESTBEDS))]
    shape = replace(rng.choice(list(workloads(testbed))), ep=rng.choice([1, 8]), esp=rng.choice([1, 4]))
    line = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8.5))
    costs = StepCosts((shape.layer_costs(testbed.costs),) * 4, line)
    degree = rng.choice([2, 4])

    def step_s(bucket_bytes: int) -> float:
        return micro_schedule(costs, StepSplit(degree, degree, bucket_bytes)).makespan_s(costs.contention)

    return max(costs.gradient_bytes), step_s


def run_steps(tuner: BucketTuner, step_s: Callable[[int], float], steps: int) -> None:
    for _ in range(steps):
        tuner.note(step_s(tuner.bucket_bytes))


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.slow if part else ()) for part in range(5)])
def test_eight_samples_come_within_5_percent_of_a_fine_sweep(part: int) -> None:
    rng = random.Random()
    for _ in range(10):
        largest, step_s = random_setting(rng)
        tuner = BucketTuner(largest, steps=1, seed=rng.randrange(2**31))
        run_steps(tuner, step_s, 8)
        assert tuner.settled and len(tuner.tried) == 8
        best = min(step_s(int(size)) for size in np.geomspace(largest / 64, largest, 24))
        assert step_s(tuner.bucket_bytes) <= 1.05 * best, (tuner.tried, best)


def test_every_size_is_measured_for_some_steps_and_the_best_is_kept() -> None:
    tuner, seen = BucketTuner(1000, samples=3, steps=4, drift=None), []
    for _ in range(12):
        assert not tuner.settled
        seen.append(tuner.bucket_bytes)
        # One step in four is slow: a median of four is not moved by it beyond what the others are.
        tuner.note(abs(tuner.bucket_bytes - 300) + (1e6 if len(seen) % 4 == 0 else 0.0))
    assert [len(set(seen[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1] and len(set(seen)) == 3
    assert tuner.settled and tuner.bucket_bytes == min(set(seen), key=lambda size: abs(size - 300))
    run_steps(tuner, lambda size: 1e9, 100)
    assert tuner.settled


def test_steps_that_change_start_it_again() -> None:
    tuner = BucketTuner(1 << 20, samples=2, steps=2)
    run_steps(tuner, lambda size: 1.0, 4)
    run_steps(tuner, lambda size: 1.09, 10)
    assert tuner.settled
    run_steps(tuner, lambda size: 1.12, 2)
    assert not tuner.settled and not tuner.tried
    run_steps(tuner, lambda size: 1.12, 4)
    assert tuner.settled


def test_all_ranks_try_the_same() -> None:
    tuners = [BucketTuner(12345, steps=1, seed=3) for _ in range(2)]
    for tuner in tuners:
        run_steps(tuner, lambda size: size % 97, 8)
    assert tuners[0].tried == tuners[1].tried


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_a_gradient_of_few_bytes(largest: int) -> None:
    tuner = BucketTuner(largest, steps=1)
    run_steps(tuner, float, 8)
    assert tuner.settled and 1 <= tuner.bucket_bytes <= largest


@pytest.mark.parametrize("wrong", [{"largest_bytes": 0}, {"samples": 0}, {"steps": 0}, {"drift": 0.0}])
def test_numbers_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="S_p"):
        BucketTuner(**{"largest_bytes": 10, **wrong})


def test_without_scikit_learn_it_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedmoe.training.step_plan.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="scikit-learn"):
        BucketTuner(1000)
