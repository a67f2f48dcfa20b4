"""Experts sent by one-sided puts instead of collectives, between processes that share memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cluster import Cluster
from tests.lifetime import left_in_shared_memory
from tests.placement.test_expert_transport import exchange_by_puts
from tests.training.placed import EXACT, run

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize(("world", "seeds"), [(2, 8), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_puts_move_experts_between_any_placements(cluster: Cluster, world: int, seeds: int) -> None:
    assert min(cluster.run(world, exchange_by_puts, seeds)) > seeds // 5
    assert not left_in_shared_memory()


# Replicas arrive before the layer's rows. On-demand replicas, which only collectives have on a CPU, reorder rows.
EARLY = EXACT | {"costs": replace(EXACT["costs"], token_bytes=10_000)}


@pytest.mark.parametrize(
    ("more", "steps"),
    [({}, 3), *(pytest.param(more, 7, marks=pytest.mark.slow) for more in ({}, {"rematerialises": True}, EARLY))],
    ids=str,
)
def test_training_with_puts_is_bitwise_equal_to_collectives(cluster: Cluster, more: dict[str, Any], steps: int) -> None:
    """Results have the same bits as with collectives; in the third step one rank has no tokens."""
    options = {"overlap": 4, "memory": 2} | more
    found = cluster.run(2, run, "fssdp", steps, options | {"heap": True})
    wanted = cluster.run(2, run, "fssdp", steps, options)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["sent"] == theirs["sent"] > 0
        for kind in ("losses", "parameters", "gradients", "dense"):
            torch.testing.assert_close(ours[kind], theirs[kind], rtol=0, atol=0)
