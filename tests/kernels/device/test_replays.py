"""Both passes over ranks as captured in a CUDA graph: no host waits, and every step has the same launches."""

from __future__ import annotations

import math
import re

import pytest

from tests.cluster import Cluster
from tests.kernels.device.replays import replay_layer, replay_passes, tell_late
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(
    ("tokens", "degrees", "nodes", "steps"),
    [
        ([9, 5], (1, 1), (), 5),
        *slowly(
            ([7, 0], (2, 3), (), 2), ([6, 5], (2, 1), (0, 1), 2), ([5, 0, 9, 1], (3, 2), (), 2), ([1, 1], (1, 1), (), 2)
        ),
    ],
    ids=str,
)
def test_graph_replays_equal_eager(
    cluster: Cluster, tokens: list[int], degrees: tuple[int, int], nodes: tuple[int, ...], steps: int
) -> None:
    """With exactly the room that the fullest rank and step need."""
    found = cluster.run(len(tokens), replay_passes, tokens, degrees, steps, 0, False, nodes, timeout_s=110)
    assert found == [[]] * len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_graph_replays_equal_eager_under_random_delays(cluster: Cluster, seed: int) -> None:
    """A slot that is reused before its rows were read, or read before they arrived, would change the results."""
    tokens, degrees, nodes = [
        ([9, 5], (1, 1), ()),
        ([7, 0], (2, 3), ()),
        ([6, 5], (2, 1), (0, 1)),
        ([9, 5], (1, 2), ()),
    ][seed % 4]
    assert cluster.run(2, replay_passes, tokens, degrees, 4, 0, False, nodes, seed) == [[], []]


def test_captured_sequence_numbers_give_stale_rows(cluster: Cluster) -> None:
    """A graph that stores sequence numbers as launch arguments reads rows before they arrive."""
    found = cluster.run(2, replay_passes, [9, 5], (1, 1), 1, 0, True)
    assert any("step 1" in one for one in found[0])


@pytest.mark.parametrize("nodes", [(), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str)
def test_row_count_beyond_bound_raises_on_all_ranks(cluster: Cluster, nodes: tuple[int, ...]) -> None:
    """One row too many: all ranks raise with the row count of the fullest rank and step."""
    for outcome in cluster.outcomes(2, replay_passes, [9, 5], (1, 2), 3, -1, False, nodes):
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome
        told = re.search(r"(\d+) rows came to the experts of fused_experts on .*room for (\d+)", outcome.error[1])
        assert told is not None and int(told[1]) == int(told[2]) + 1, outcome.error[1]


@pytest.mark.parametrize(
    ("sizes", "steps"), [({"ep": 2}, 1), *slowly(({"ep": 2}, 3), ({"esp": 2}, 2), ({"ep": 2, "esp": 2}, 2))], ids=str
)
def test_layer_graph_replays_equal_eager(cluster: Cluster, sizes: dict[str, int], steps: int) -> None:
    """Includes gate, order and losses."""
    world = math.prod(sizes.values())
    assert cluster.run(world, replay_layer, sizes, steps) == [[]] * world


@pytest.mark.parametrize("how", ["rows", "rows, eager", "logits"])
def test_deferred_errors_are_raised_on_all_ranks(cluster: Cluster, how: str) -> None:
    text = "1 tokens with router logits that are NaN or infinite"
    if how != "logits":
        text = "36 rows came to the experts of MoELayer 1 on this rank, and there is room for 34"
    for rank, message in enumerate(cluster.run(2, tell_late, how)):
        named = "" if rank == 1 else "ended because rank 1 failed in kernels over the ep group .*: "
        assert re.match(f"rank {rank}: {named}{text}", message), message
