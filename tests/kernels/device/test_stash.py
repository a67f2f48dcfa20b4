"""Layers over ranks that share a stash: the same bits as without one, in whatever order their backwards come."""

from __future__ import annotations

import math
import re

import pytest

from fusedmoe.engine.stash import Stash
from fusedmoe.errors import ConfigError
from tests.cluster import Cluster
from tests.kernels.device.stashes import (
    give_and_take,
    kept_bytes,
    layers_alike,
    lose_pages,
    replay_stash,
    too_few_pages,
)
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(
    ("tokens", "degrees", "back", "steps", "frozen"),
    [
        ([9, 5], (2, 1), (0, 1), 1, False),
        *slowly(
            ([9, 5], (1, 1), (0, 3, 1, 2), 1, False),
            ([7, 0], (2, 3), (1, 2, 0), 1, False),
            ([5, 0, 9, 1], (3, 3), (0, 1), 1, False),
            ([0, 1], (1, 2), (0, 1), 2, True),
        ),
    ],
    ids=str,
)
def test_replays(
    cluster: Cluster, tokens: list[int], degrees: tuple[int, int], back: tuple[int, ...], steps: int, frozen: bool
) -> None:
    """With just enough pages for the fullest of the ranks and steps, all of which are free in the end."""
    found = cluster.run(len(tokens), replay_stash, tokens, degrees, back, steps, 0, frozen, timeout_s=280)
    assert found == [[]] * len(tokens)


def named(rank: int, text: str, message: str) -> bool:
    """Tells whether a rank has been told of a fault of rank 1's, which itself may hear of it in a wait for a rank that
    ended sooner."""
    found = re.match(f"rank {rank}: (.*ended because rank 1 failed in kernels over the ep group .*: )?{text}", message)
    return found is not None and (rank == 1 or found[1] is not None)


def test_a_page_too_few(cluster: Cluster) -> None:
    """Told by the number of the fullest rank and step, on all ranks."""
    for outcome in cluster.outcomes(2, replay_stash, [9, 5], (1, 2), (0, 1), 2, 1):
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome
        told = re.search(r"(\d+) pages of 4 rows .* with fused_experts, and it has (\d+)", outcome.error[1])
        assert told is not None and int(told[1]) == int(told[2]) + 1, outcome.error[1]


@pytest.mark.parametrize("how", ["asked", "eager", "in turn"])
def test_layers_that_have_too_few(cluster: Cluster, how: str) -> None:
    text = "2 pages of 128 rows are needed in the stash on this rank with MoELayer 1, and it has 1"
    for rank, message in enumerate(cluster.run(2, too_few_pages, how)):
        assert message == "nothing" if how == "in turn" else named(rank, text, message), message


def test_a_page_that_is_used_again_too_early(cluster: Cluster) -> None:
    text = "1 pages of the stash on this rank were given to others before the backward of layer 0 had read them"
    for rank, message in enumerate(cluster.run(2, lose_pages)):
        assert named(rank, text, message), message


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"esp": 2}, {"ep": 2, "esp": 2}], ids=str)
def test_layers_are_alike(cluster: Cluster, sizes: dict[str, int]) -> None:
    world = math.prod(sizes.values())
    assert cluster.run(world, layers_alike, sizes) == [[]] * world


@pytest.mark.parametrize("sizes", [(0,), (-1,), (5, 0)], ids=str)
def test_sizes_that_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="Stash: rows=.*, page_rows=.*; give numbers of at least 1"):
        Stash(*sizes)


def test_pages_come_back(cluster: Cluster) -> None:
    """Nothing is taken where no backward comes; a graph that is dropped gives with the next forward."""
    found = cluster.run(2, give_and_take)
    for free in found:
        assert free[0] == free[3] == free[4] == free[5] == 8, found
        assert free[1] == free[2] < 8 and free[6:] == [True, True], found


@pytest.mark.slow
def test_what_is_kept(cluster: Cluster) -> None:
    """With a bound of all rows that can come, a layer keeps tables of these beside its output, and nothing as wide as a
    row. docs/guides/one-sided.md has the numbers."""
    mean, row_bytes, output = 128, 4 * (256 + 2 * 128), 4 * 64 * 256
    shared, with_stash = cluster.run(4, kept_bytes, 6.0)[0]
    nothing, without = cluster.run(4, kept_bytes, None)[0]
    assert (with_stash - output, without - output, nothing) == (59_424, 1_124_328, 0)
    assert 0.98 < 4 * mean * row_bytes / (without - with_stash) <= 1
    # Beside the rows of the pages there are two numbers of each, and two of all.
    assert shared == 6 * (128 * row_bytes + 16) + 16
