"""Long runs: a job with repeated faults reaches the losses of a fault-free job, without resource growth."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.flatness import growth, lives
from tests.chaos.long_jobs import FAULTS, LongJob
from tests.cluster import Cluster


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interrupted_job_reaches_losses_of_fault_free_job(cluster: Cluster, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    found = LongJob(cluster, tmp_path / "job", 160, 20, 5, seed).run()
    assert not found["problems"], found
    assert found["faults"].keys() == FAULTS.keys() and found["lines_compared"] == 161


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_run_has_no_resource_growth() -> None:
    """800 steps, 80 topologies, 40 plans, 20 checkpoints, each loaded again."""
    for looks in lives(80):
        assert not growth(looks), looks
