"""Long runs: a job that faults interrupt again and again comes to the losses of one without, and nothing piles up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.long_jobs import FAULTS, live_long, train_with_fault
from tests.cluster import Cluster

TINY = ["--layers", "2", "--model-dim", "16", "--hidden", "8", "--experts", "4", "--seq-len", "16", "--batch", "2"]
TINY += ["--gate", "gshard", "--eval-batches", "2", "--timeline-step", "1000000", "--timeout", "20"]
KEYS = ("step", "loss", "aux_loss", "grad_norm", "dropped", "held_out_loss")


def losses(run: Path) -> dict[tuple[int, bool], list[Any]]:
    """Of each step, the last that was written."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(r["step"], "held_out_loss" in r): [r.get(key) for key in KEYS] for r in records}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("steps", "every", "saves"), [(60, 10, 5)])
def test_a_job_that_faults_interrupt(cluster: Cluster, tmp_path: Path, steps: int, every: int, saves: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(10):
        (text / f"{number}.txt").write_text(f"Text number {number} has {number * 17} words, or so it says. " * 20)
    flags = [*TINY, "--steps", str(steps), "--checkpoint-every", str(saves), "--data", str(text)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cluster.run(2, train_with_fault, [*flags, "--run-dir", str(whole)], "", 0, 0, timeout_s=600.0)
    where, ended = ["--run-dir", str(parts)], []
    for number in range(steps // every + 3):
        fault = list(FAULTS)[number % 3] if number < steps // every else ""
        # Not before there is a checkpoint to go on from.
        step = saves + rng.randint(2, every)
        outcomes = cluster.outcomes(
            2,
            train_with_fault,
            [*flags[: 0 if number else None], *where],
            fault,
            rng.randrange(2),
            step,
            timeout_s=300.0,
        )
        codes = [outcome.value if outcome.error is None else outcome.error[0] for outcome in outcomes]
        ended.append((fault, codes))
        assert "TimeoutError" not in codes, (seed, ended, [outcome.error for outcome in outcomes])
        where = ["--resume", str(parts)]
        if codes == [0, 0]:
            break
    assert losses(parts) == losses(whole), (seed, ended)
    assert [fault for fault, codes in ended if codes != [0, 0]] == ["kill", "disk full"], (seed, ended)
    assert [fault for fault, codes in ended if codes == [0, 0]] == ["pause"], (seed, ended)
    more = ["--resume", str(parts), "--steps", str(steps + 5)]
    assert cluster.run(4, train_with_fault, more, "", 0, 0, timeout_s=300.0) == [0] * 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_piles_up(cluster: Cluster, tmp_path: Path) -> None:
    """2,000 steps, 200 topologies, 100 plans, 50 checkpoints, each loaded again."""
    for found in cluster.run(2, live_long, str(tmp_path), 200, timeout_s=1500.0):
        (first, _), *_, (last, bytes_last) = found
        assert not last - first, (first, last)
        assert bytes_last - found[1][1] < 16 * 2**20, [size for _, size in found]
    assert not [name for name in tmp_path.iterdir() if name.name != "checkpoint"]
