"""MoELayer with schedule="fused": kernels send and receive, and results stay the same."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.kernels.device.fused_layers import (
    auto,
    by_collectives_where_it_must,
    hooked,
    hooked_on_one_rank,
    no_room,
    same_as_collectives,
    saved_bytes,
    without_a_heap,
)
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"ep": 2}),
        *slowly((2, {"esp": 2}), (4, {"ep": 2, "esp": 2}), (4, {"ep": 2})),
    ],
    ids=str,
)
def test_fused_layer_equals_collectives(cluster: Cluster, world: int, sizes: dict[str, int]) -> None:
    assert cluster.run(world, same_as_collectives, sizes) == [[]] * world


def test_fused_layer_rejects_batch_beyond_buffers(cluster: Cluster) -> None:
    here, there = cluster.run(2, no_room)
    assert here.startswith("refused: tokens=200 is more than the receive buffers have room for")
    assert "rank 0 failed in MoELayer.forward: ConfigError: tokens=200 is more than" in there


def test_unsupported_layer_falls_back_to_collectives(cluster: Cluster) -> None:
    assert cluster.run(2, by_collectives_where_it_must) == [{"dispatch"}] * 2


def test_missing_heap_on_one_rank_falls_back_on_all(cluster: Cluster) -> None:
    """All ranks decide together: a rank with a heap would otherwise wait for one without."""
    for wrong in cluster.run(2, without_a_heap):
        assert len(wrong) == 1 and wrong[0].startswith("no fused operation among")


def test_expert_hooks_fall_back_to_collectives(cluster: Cluster) -> None:
    fused, collectives = {"dispatch-expert-combine"}, {"dispatch"}
    assert cluster.run(2, hooked) == [[fused, collectives, fused]] * 2


@pytest.mark.slow
def test_expert_hook_on_one_rank_raises() -> None:
    ranks = Cluster()  # a separate cluster: the job is over
    try:
        here, there = ranks.run(2, hooked_on_one_rank)
    finally:
        ranks.close()
    assert "rank 1" in here and "because of the forward hook" in there, (here, there)


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False], ids=["fused_faster", "fused_slower"])
def test_auto_schedule_selects_faster_measured_path(cluster: Cluster, quick: bool) -> None:
    for kinds, chunks, wrong in cluster.run(2, auto, quick, timeout_s=280):
        assert wrong == [] and kinds == {"dispatch-expert-combine" if quick else "expert"}
        assert chunks == ((2, 4) if quick else (0, 0))


@pytest.mark.slow
def test_saved_bytes_for_backward_are_bounded(cluster: Cluster) -> None:
    """Forward saves rows and pre-activations for the most rows it can receive, plus tables and the output."""
    bound, row_bytes, output = 4 * 64 * 2, 4 * (256 + 2 * 128), 4 * 64 * 256
    saved = cluster.run(4, saved_bytes)[0] - output
    assert saved == 1_124_328 and bound * row_bytes < saved < bound * (row_bytes + 160)
