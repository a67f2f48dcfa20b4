"""Properties of layers and operations over ranks: right to 1e-10, or refused on all ranks by the name of one."""

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
def test_a_few(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    cluster.run(world, hold, ep, esp, seeds(8))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), SHAPES + LARGE)
def test_many(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    cluster.run(world, hold, ep, esp, seeds(50), timeout_s=280)


def refused(cluster: Cluster, world: int, ep: int, esp: int, seed: int) -> None:
    ends = cluster.run(world, spoil, ep, esp, seed)
    for kind, text, culprit, moved in ends:
        assert kind == "RankError" and f"rank {culprit}" in text and moved == 0, (seed, ends)


@pytest.mark.parametrize("seed", seeds(4), ids=lambda seed: "seed")
def test_a_few_spoilt(cluster: Cluster, seed: int) -> None:
    refused(cluster, *SHAPES[seed % 2], seed)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), SHAPES + LARGE[:1])
def test_many_spoilt(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    for seed in seeds(8):
        refused(cluster, world, ep, esp, seed)
