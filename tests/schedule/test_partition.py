"""FSMoE's partition of gradients, against its definition and all partitions."""

from __future__ import annotations

import random
from itertools import product

import pytest

from fusedmoe.schedule.cost import NO_CONTENTION, Line
from fusedmoe.schedule.passes import GradientPartition, choose_degree, three_queues
from fusedmoe.schedule.policies.fsmoe_plans import PassOption, bucket_s, pass_options, search
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts
from tests.schedule.paper_partition import fill_free, spread_rest
from tests.schedule.plans import ORDERS, random_costs


def backward_s(costs: StepCosts, of, partition: GradientPartition) -> float:
    """Compute the backward pass by its definition; fail where a place has taken more bytes than were ready."""
    line, seconds, ready = costs.all_reduce, 0.0, 0.0
    for layer in reversed(range(len(of))):
        middle, beside = partition.pipeline_bytes[layer], partition.dense_bytes[layer]
        ready -= middle + beside
        assert middle >= 0 and beside >= 0 and ready >= -1.0, "in back-propagation order: no more than what is ready"
        seconds += min(max(way.saturated_extra_s + bucket_s(line, middle), way.no_all_reduce_s) for way in of[layer])
        seconds += max(costs.layers[layer].dense_total_s("backward"), bucket_s(line, beside))
        ready += costs.layers[layer].gradient_bytes
    return seconds + bucket_s(line, ready)


def random_ways(rng: random.Random, costs: StepCosts) -> list[list[PassOption]]:
    order = rng.choice(ORDERS)
    return [pass_options(layer.chunks["backward"], order, costs.contention) for layer in costs.layers]


def test_pass_options_equal_choose_degree():
    rng = random.Random()
    for _ in range(30):
        costs = random_costs(rng, NO_CONTENTION)
        layer = costs.layers[0]
        found = pass_options(layer.chunks["backward"], three_queues, NO_CONTENTION)
        assert [way.no_all_reduce_s for way in found] == sorted(way.no_all_reduce_s for way in found)
        assert [way.slack_s for way in found] == sorted(way.slack_s for way in found)
        for gar in (0.0, 1e-4, 1e-2, 1.0):
            best = choose_degree(layer.chunks["backward"], gar).seconds
            assert min(max(way.saturated_extra_s + gar, way.no_all_reduce_s) for way in found) == pytest.approx(
                best, rel=1e-9
            )


def layer(slack_s: float, dense_s: float, gradient_bytes: int) -> tuple[LayerCosts, list[PassOption]]:
    costs = LayerCosts({"forward": {}, "backward": {}}, {"backward": {"attention": dense_s}}, gradient_bytes)
    return costs, [PassOption(10.0 - slack_s, 10.0)]


def test_fill_free_of_worked_example():
    # An all-reduce of n bytes takes 1 + n/1000 s. Layer 2 is the first in backward, when no gradient is ready yet.
    layers = [layer(4.0, 3.0, 5000), layer(1.0, 3.0, 6000), layer(9.0, 9.0, 4000)]
    costs = StepCosts(tuple(one for one, _ in layers), Line(1.0, 1e-3))
    # Layer 1 hides 1 s in its middle: too short to start an all-reduce. Its dense part hides 3 s: 2,000 of the 4,000
    # bytes. Layer 0: 4 s, 3,000 of 2,000 + 6,000; then 3 s, 2,000. At the end 3,000 + 5,000: 9 s.
    partition = fill_free(costs, [found for _, found in layers])
    assert partition == GradientPartition((3000.0, 0.0, 0.0), (2000.0, 2000.0, 0.0))
    assert backward_s(costs, [found for _, found in layers], partition) == 3 * 10 + 3 + 3 + 9 + 9


def test_fill_free_takes_at_most_ready_bytes():
    layers = [layer(9.0, 9.0, 100), layer(9.0, 9.0, 700)]
    costs = StepCosts(tuple(one for one, _ in layers), Line(1.0, 1e-3))
    assert fill_free(costs, [found for _, found in layers]) == GradientPartition((700.0, 0.0), (0.0, 0.0))


def test_search_moves_remaining_bytes_to_other_degree():
    # Nothing is free, but with its second option layer 0 is only 0.5 s longer and hides 2.5 s.
    first, _ = layer(0.0, 0.0, 1000)
    of = [[PassOption(10.0, 10.0), PassOption(8.0, 10.5)]] * 2
    costs = StepCosts((first, first), Line(1.0, 1e-3))
    start = fill_free(costs, of)
    assert start == GradientPartition((0.0, 0.0), (0.0, 0.0)) and backward_s(costs, of, start) == 20 + 3
    for found in (search(costs, of), spread_rest(costs, of, start)):
        assert found.pipeline_bytes == (pytest.approx(1000.0, rel=1e-3), 0.0)
        assert backward_s(costs, of, found) == pytest.approx(20.5 + 2, rel=1e-3)


def test_search_is_at_least_as_fast_as_two_step_partition():
    rng = random.Random()
    for _ in range(15):
        costs = random_costs(rng)
        of = random_ways(rng, costs)
        step_1 = fill_free(costs, of)
        step_2 = spread_rest(costs, of, step_1)
        best = backward_s(costs, of, search(costs, of))
        # The search merges states that are half a byte apart, in each layer.
        rounding_s = 0.5 * len(of) * costs.all_reduce.beta_s
        assert best <= backward_s(costs, of, step_2) * (1 + 1e-9) + rounding_s
        assert backward_s(costs, of, step_2) <= backward_s(costs, of, step_1) * (1 + 1e-9)


def test_search_equals_brute_force_over_partitions():
    """Brute force: every multiple of a twelfth of the ready bytes, in every place."""
    rng = random.Random()
    shares = [n / 12 for n in range(13)]
    for _ in range(2):
        costs = random_costs(rng)
        layers = (costs.layers * 3)[:3]
        costs = StepCosts(tuple(layers), costs.all_reduce, costs.contention)
        of = random_ways(rng, costs)
        best = backward_s(costs, of, search(costs, of))
        for first, second, third, fourth in product(shares, repeat=4):
            ready = float(layers[2].gradient_bytes)
            middle_1 = ready * first
            beside_1 = (ready - middle_1) * second
            ready += layers[1].gradient_bytes - middle_1 - beside_1
            middle_0 = ready * third
            beside_0 = (ready - middle_0) * fourth
            partition = GradientPartition((middle_0, middle_1, 0.0), (beside_0, beside_1, 0.0))
            assert best <= quick_backward_s(costs, of, partition) * (1 + 1e-9)


def quick_backward_s(costs: StepCosts, of, partition: GradientPartition) -> float:
    line = costs.all_reduce
    seconds = bucket_s(line, sum(costs.gradient_bytes) - sum(partition.pipeline_bytes) - sum(partition.dense_bytes))
    for found, one, middle, beside in zip(of, costs.layers, *partition, strict=True):
        gar = bucket_s(line, middle)
        seconds += min(max(way.saturated_extra_s + gar, way.no_all_reduce_s) for way in found)
        seconds += max(one.dense_total_s("backward"), bucket_s(line, beside))
    return seconds


def test_differential_evolution_is_deterministic():
    rng = random.Random(3)
    chunks = {"expert": StageTime(1e-3, 2e-2), "dispatch": StageTime(1e-3, 1e-2), "combine": StageTime(1e-3, 1e-2)}
    one = LayerCosts({"forward": chunks, "backward": chunks}, {"backward": {"attention": 1e-3}}, 3 * 10**7)
    costs = StepCosts((one,) * 4, Line(1e-4, 1e-9))
    of = random_ways(rng, costs)
    start = fill_free(costs, of)
    assert spread_rest(costs, of, start, seed=1) == spread_rest(costs, of, start, seed=1)


def test_partition_of_zero_layers():
    costs = StepCosts((), Line(1.0, 1.0))
    assert search(costs, []) == fill_free(costs, []) == GradientPartition((), ())
