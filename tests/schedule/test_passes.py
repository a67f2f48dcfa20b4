"""The choice of chunks for one pass, against all numbers of chunks on published and drawn layers."""

from __future__ import annotations

import random

import pytest

from bench.simulate.grid import workloads
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import alternating, choose_degree, one_queue, pass_s, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StageTime
from fusedmoe.schedule.task import PIPELINE, Task
from tests.schedule.plans import ORDERS, random_layer


def brute_force(chunks, gar, order, contention, limit) -> list[float]:
    """Simulated seconds of each degree from 1."""
    kinds = tuple(kind for kind in PIPELINE if kind in chunks)
    found = []
    for degree in range(1, limit + 1):
        buckets = [Task("gradient-all-reduce", 0, 1, "backward")] if gar else []
        plan = Plan.from_orders(order(kinds, degree, "backward", 0, buckets))
        of = {kind: chunks[kind].seconds(degree) for kind in kinds} | {"gradient-all-reduce": gar}
        found.append(makespan(plan, TaskDurations({task: of[task.kind] for task in plan}, contention)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("testbed", ["B", pytest.param("A", marks=pytest.mark.slow)])
def test_chosen_degree_is_optimal_on_published_grid(testbed):
    """Both passes of all 1,458 cases (486 differ), every degree up to 16 simulated; backward with an all-reduce."""
    model = TESTBEDS[testbed].costs
    plans = {
        (r, gar): Plan.from_orders(three_queues(PIPELINE, r, buckets=gar)) for r in range(1, 17) for gar in ((), (AR,))
    }
    count = 0
    for workload in workloads(TESTBEDS[testbed]):
        layer = workload.layer_costs(model)
        reduce_s = model.line("all-reduce/dp").seconds(layer.gradient_bytes)
        for phase, gar in (("forward", 0.0), ("backward", reduce_s)):
            chunks = layer.chunks[phase]
            seconds = []
            for r in range(1, 17):
                plan = plans[r, (AR,) if gar else ()]
                of = {kind: part.seconds(r) for kind, part in chunks.items()} | {AR.kind: gar}
                seconds.append(makespan(plan, TaskDurations({task: of[task.kind] for task in plan})))
            choice = choose_degree(chunks, gar, max_degree=16)
            assert seconds[choice.degree - 1] <= min(seconds) * (1 + 1e-12)
            assert choice.seconds == pytest.approx(min(seconds), rel=1e-9)
            count += 1
    assert 3 * count == 2 * 1458


AR = Task("gradient-all-reduce", 0, 1, "backward")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "contention",
    [NO_CONTENTION, *map(Contention.between_links, (0.7, 0.45)), Contention(0.9, 0.8, 0.95, 0.7, 0.85, 0.6)],
    ids=["no contention", "link contention", "strong link contention", "all resources"],
)
def test_chosen_degree_is_optimal_on_random_layers(order, contention):
    rng = random.Random()
    for _ in range(8):
        chunks = random_layer(rng).chunks["backward"]
        gar, limit = rng.choice([0.0, 10 ** rng.uniform(-4, -1)]), rng.choice([1, 5, 12])
        seconds = brute_force(chunks, gar, order, contention, limit)
        choice = choose_degree(chunks, gar, order=order, contention=contention, max_degree=limit)
        assert choice.seconds == pytest.approx(min(seconds), rel=1e-9)
        assert seconds[choice.degree - 1] == pytest.approx(min(seconds), rel=1e-9)
        for degree in range(1, limit + 1):
            found = pass_s(chunks, degree, gar, order=order, contention=contention)
            assert found == pytest.approx(seconds[degree - 1], rel=1e-9)


def test_ties_choose_smallest_degree():
    assert choose_degree({"expert": StageTime(0.0, 1.0)}).degree == 1
    assert choose_degree({"expert": StageTime(0.0, 1.0)}, contention=Contention.between_links(0.5)).degree == 1


def test_optimal_degrees_of_passes_differ_as_published():
    """Testbed B: 918 of 1,458 cases here, 912 in the paper."""
    differ = 0
    for workload in workloads(TESTBEDS["B"]):
        chunks = workload.layer_costs(TESTBEDS["B"].costs).chunks
        degrees = {choose_degree(chunks[phase], max_degree=8).degree for phase in chunks}
        differ += 3 * (len(degrees) > 1)
    assert 0.95 * 918 <= differ <= 1.05 * 918


def test_limit_below_one_is_rejected():
    with pytest.raises(ConfigError, match="at least 1"):
        choose_degree({"expert": StageTime(0.0, 1.0)}, max_degree=0)


def test_alternating_order_helps_with_slow_intra_node_links():
    chunks = {kind: StageTime(1e-4, 1e-2) for kind in PIPELINE} | {"all-gather": StageTime(1e-4, 4e-2)}
    both = [choose_degree(chunks, order=order).seconds for order in (three_queues, alternating, one_queue)]
    assert both[1] < both[0] < both[2]
