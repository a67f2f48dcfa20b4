"""Long runs: a job that faults interrupt again and again comes to the losses of one without, and nothing piles up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.flatness import growth, lives
from tests.chaos.long_jobs import FAULTS, LongJob
from tests.cluster import Cluster


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_faults_interrupt(cluster: Cluster, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    found = LongJob(cluster, tmp_path / "job", 160, 20, 5, seed).run()
    assert not found["problems"], found
    assert found["faults"].keys() == FAULTS.keys() and found["lines_compared"] == 161


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_piles_up() -> None:
    """800 steps, 80 topologies, 40 plans, 20 checkpoints, each loaded again."""
    for looks in lives(80):
        assert not growth(looks), looks
