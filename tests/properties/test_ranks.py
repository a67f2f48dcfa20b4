"""Properties of layers and operations over ranks: right to 1e-10, or refused on all ranks, naming the faulty rank."""

from __future__ import annotations

import random

import pytest

from tests.cluster import Cluster
from tests.properties.ranks import hold, spoil

SHAPES = [(2, 2, 1), (2, 1, 2)]  # world, ep, esp
LARGE = [(4, 2, 2), (4, 4, 1)]


def seeds(count: int) -> range:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    return range(first, first + count)


@pytest.mark.parametrize(("world", "ep", "esp"), SHAPES)
def test_layers_and_operations_equal_dense_reference(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    cluster.run(world, hold, ep, esp, seeds(8))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), SHAPES + LARGE)
def test_layers_and_operations_equal_dense_reference_many_seeds(
    cluster: Cluster, world: int, ep: int, esp: int
) -> None:
    cluster.run(world, hold, ep, esp, seeds(50), timeout_s=280)


def assert_culprit_named_on_all_ranks(cluster: Cluster, world: int, ep: int, esp: int, seed: int) -> None:
    ends = cluster.run(world, spoil, ep, esp, seed)
    for kind, text, culprit, moved in ends:
        assert kind == "RankError" and f"rank {culprit}" in text and moved == 0, (seed, ends)


@pytest.mark.parametrize("seed", seeds(4), ids=lambda seed: "seed")
def test_corrupted_input_names_rank_before_any_exchange(cluster: Cluster, seed: int) -> None:
    assert_culprit_named_on_all_ranks(cluster, *SHAPES[seed % 2], seed)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), SHAPES + LARGE[:1])
def test_corrupted_input_names_rank_before_any_exchange_many_seeds(
    cluster: Cluster, world: int, ep: int, esp: int
) -> None:
    for seed in seeds(8):
        assert_culprit_named_on_all_ranks(cluster, world, ep, esp, seed)
