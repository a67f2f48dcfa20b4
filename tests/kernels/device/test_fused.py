"""The fused operations over processes that share memory: the same bits as collectives, for any routing."""

from __future__ import annotations

import re

import pytest

from tests.cluster import Cluster
from tests.kernels.device.deaths import check_death
from tests.kernels.device.on_buffers import (
    allocate_differently,
    compare,
    compare_shards,
    exchange_often,
    fail_in_the_middle,
    refuse,
)
from tests.lifetime import left_in_shared_memory
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(
    ("tokens", "degrees", "bias"),
    [
        ([7, 0], [1, 3], True),
        # The third degree of a case has a capacity, the second an expert without rows.
        *slowly(([11, 0], [2, 8, 5], False), ([1, 1], [2, 3, 8], True), ([200, 130], [1, 4], False)),
    ],
    ids=str,
)
def test_fused_on_two_ranks_equals_collectives(
    cluster: Cluster, tokens: list[int], degrees: list[int], bias: bool
) -> None:
    assert cluster.run(2, compare, tokens, degrees, bias, timeout_s=110) == [[], []]


@pytest.mark.parametrize("degrees", [[5], *slowly([2, 4, 6, 7])], ids=str)
def test_fused_on_four_ranks_with_any_chunk_count(cluster: Cluster, degrees: list[int]) -> None:
    tokens = [3, 0, 6, 2]
    assert cluster.run(4, compare, tokens, degrees, False, timeout_s=110) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fused_with_every_pipeline_degree(cluster: Cluster, world: int) -> None:
    tokens = [12, 7, 0, 30][:world]
    degrees = list(range(1, 9)) if world == 2 else [1, 3, 8]
    assert cluster.run(world, compare, tokens, degrees, True, timeout_s=280) == [[]] * world


@pytest.mark.parametrize(
    ("tokens", "degrees", "bias"),
    [
        ([9, 0], [(2, 3)], True),
        *slowly(
            ([6], [(3, 4)], False),
            ([9, 20], [(1, 2), (5, 3), (8, 7)], True),
            ([5, 0, 17, 3], [(1, 4), (4, 2)], True),
            ([200, 130], [(6, 1)], False),
        ),
    ],
    ids=str,
)
def test_fused_with_different_backward_chunk_count(
    cluster: Cluster, tokens: list[int], degrees: list[tuple[int, int]], bias: bool
) -> None:
    """With empty experts, ranks and chunks, and with a capacity."""
    assert cluster.run(len(tokens), compare, tokens, degrees, bias, timeout_s=110) == [[]] * len(tokens)


def test_fused_without_tokens_on_any_rank(cluster: Cluster) -> None:
    assert cluster.run(2, compare, [0, 0], [2], False) == [[], []]


@pytest.mark.parametrize("rows", [pytest.param([6, 11], marks=pytest.mark.slow), [0, 4]], ids=str)
def test_fused_over_expert_shards(cluster: Cluster, rows: list[int]) -> None:
    assert cluster.run(2, compare_shards, rows) == [[], []]


@pytest.mark.parametrize(
    ("world", "count", "ahead"),
    [
        (2, 30, False),
        (4, 12, True),
        *(pytest.param(*of, ahead, marks=pytest.mark.slow) for of in ((2, 120), (4, 60)) for ahead in (False, True)),
    ],
)
def test_repeated_exchanges_reuse_buffers_correctly(cluster: Cluster, world: int, count: int, ahead: bool) -> None:
    assert cluster.run(world, exchange_often, count, ahead, timeout_s=280) == [0] * world


@pytest.mark.parametrize("how", ["killed", "raises", "never"])
def test_failed_rank_is_named_by_waiting_kernel(cluster: Cluster, how: str) -> None:
    outcomes = cluster.outcomes(2, fail_in_the_middle, how, 4.0 if how == "never" else 300.0)
    assert outcomes[0].error is not None
    kind, message, _ = outcomes[0].error
    assert kind == "RankError"
    assert re.search(r"waiting for .* of rank 1, expected signal \d+, seen \d+", message), message
    parts = r"tile \d+ of the tokens|part \d+ of the routing metadata|chunk \d+ of the results|the credit"
    assert re.search(f"waiting for ({parts}) of rank 1", message), message
    assert {"killed": "its process ended", "raises": "no more", "never": "within 4 s"}[how] in message
    assert not left_in_shared_memory()


_SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(6)]


@pytest.mark.parametrize("seed", _SEEDS)
def test_rank_killed_at_random_time_ends_all_ranks(cluster: Cluster, seed: int) -> None:
    check_death(cluster, seed, ())


def test_late_rank_is_tolerated(cluster: Cluster) -> None:
    assert cluster.run(2, fail_in_the_middle, "late", 300.0) == ["done, True"] * 2


def test_more_tokens_than_buffer_capacity_raises(cluster: Cluster) -> None:
    for message in cluster.run(2, refuse):
        assert "tokens=9 is more than the receive buffers have room for (tokens=8)" in message


def test_unequal_symmetric_allocation_raises(cluster: Cluster) -> None:
    for outcome in cluster.outcomes(2, allocate_differently):
        assert outcome.error is not None and "must be equal on all ranks" in outcome.error[1]
