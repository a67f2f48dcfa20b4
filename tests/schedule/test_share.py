"""Tokens sent for each (token, k) pair, and the resulting workload."""

from __future__ import annotations

import random

import pytest

from fusedmoe.schedule.task import TaskKind
from fusedmoe.schedule.workload import Workload, uniform_share


@pytest.mark.parametrize(
    ("experts", "k", "times"),
    [
        (8, 2, {2: 1.27, 4: 1.08, 8: 1.00}),
        (128, 4, {2: 2.13, 4: 1.45, 8: 1.20, 16: 1.09}),
        (128, 8, {2: 4.01, 4: 2.20, 8: 1.50, 16: 1.21}),
        (256, 8, {2: 4.01, 4: 2.21, 8: 1.51, 16: 1.23}),
    ],
)
def test_uniform_share_of_known_models(experts: int, k: int, times: dict[int, float]) -> None:
    """The reduction of sent rows where experts are chosen alike."""
    assert {ranks: round(1 / uniform_share(experts, k, ranks), 2) for ranks in times} == times


@pytest.mark.parametrize(("experts", "k", "ranks"), [(6, 3, 3), (4, 4, 2), (8, 1, 4), (5, 2, 1), (3, 2, 8)])
def test_uniform_share_equals_random_draws(experts: int, k: int, ranks: int) -> None:
    """Draw experts, and count their ranks; more ranks than experts hold replicas of these."""
    chance, here = random.Random(0), max(1, experts // ranks)
    draws = [chance.sample(range(experts), k) for _ in range(20_000)]
    sent = sum(len({expert // here for expert in drawn}) for drawn in draws)
    assert sent / (k * len(draws)) == pytest.approx(uniform_share(experts, k, ranks), rel=0.02)


def test_share_scales_communication_only() -> None:
    """Fewer bytes are sent; the computation is unchanged."""
    pairs = Workload(1, 1024, 64, 128, 16, k=8, ep=2, esp=2)
    tokens = Workload(1, 1024, 64, 128, 16, k=8, ep=2, esp=2, share=0.25)
    assert tokens.volumes() == {
        kind: volume * (1 if kind == TaskKind.EXPERT else 0.25) for kind, volume in pairs.volumes().items()
    }
    assert tokens.saved_elements() == pairs.saved_elements() - 0.75 * pairs.rows * pairs.model_dim
