"""The fused operations between nodes, over a simulated NVSHMEM: bitwise equal to those on one host."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.kernels.device.deaths import check_death
from tests.kernels.device.on_buffers import EXPERTS, SLOTS, WIDTH, Degree, compare, exchange_often
from tests.kernels.device.on_nodes import APART, count_puts, return_twice
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(
    ("tokens", "degrees", "bias"),
    [
        ([7, 4], [(3, 2)], False),
        *slowly(([9, 20], [(1, 4), (2, 3), (8, 5)], True), ([20, 0], [3], False), ([200, 130], [4], False)),
    ],
    ids=str,
)
def test_fused_over_two_nodes_is_bitwise_equal(
    cluster: Cluster, tokens: list[int], degrees: list[Degree], bias: bool
) -> None:
    assert cluster.run(2, compare, tokens, degrees, bias, APART, timeout_s=110) == [[], []]


@pytest.mark.slow
def test_fused_over_two_nodes_of_two_ranks(cluster: Cluster) -> None:
    assert cluster.run(4, compare, [5, 0, 17, 3], [1, 3], True, (0, 0, 1, 1), timeout_s=280) == [[]] * 4
    assert cluster.run(4, compare, [5, 9, 7, 3], [2], True, (0, 1, 0, 1), timeout_s=280) == [[]] * 4


@pytest.mark.parametrize("rule", ["fence", "arrived"])
def test_removing_network_rule_gives_wrong_results(cluster: Cluster, rule: str) -> None:
    outcomes = cluster.outcomes(2, compare, [9, 9], [1], False, APART, (rule,))
    assert any(one.error is not None or one.value for one in outcomes)


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_repeated_exchanges_over_two_nodes(cluster: Cluster, ahead: bool) -> None:
    assert cluster.run(2, exchange_often, 25, ahead, APART) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_rank_killed_on_other_node_ends_all_ranks(cluster: Cluster, seed: int) -> None:
    check_death(cluster, seed, APART)


def test_staged_results_wait_for_peer_credit(cluster: Cluster) -> None:
    """A peer's credit shows that the network has read the staged rows; they are not overwritten earlier."""
    assert cluster.run(2, return_twice, 0, 0.3) == [(0, False)] * 2
    (_, early), (wrong, _) = cluster.run(2, return_twice, 1, 20.0)
    assert early and wrong == 12


def test_puts_are_batched_per_expert(cluster: Cluster) -> None:
    """Metadata and tokens take one put each; results take one per expert, whose rows all fit in a tile."""
    for sizes, asked in cluster.run(2, count_puts, 20):
        metadata, tokens, *results = sizes
        assert metadata % 8 == 0 and tokens % (4 * WIDTH) == 0
        assert len(results) == EXPERTS // 2 and all(size % (4 * WIDTH) == 0 for size in results)
        assert tokens <= 20 * 4 * WIDTH and sum(results) <= 20 * SLOTS * 4 * WIDTH
        assert asked > 4
