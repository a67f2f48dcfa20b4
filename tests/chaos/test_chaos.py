"""The campaign, tiny and short; `make chaos` is the long one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import campaign
from tests.chaos.__main__ import ROOT, run
from tests.chaos.campaign import CLEAN_ERROR, FAILURES, Campaign
from tests.chaos.faults import OF_MESSAGES
from tests.chaos.jobs import Spec

SCENES = (("train", "ep 2"), ("train", "esp 2"), ("train", "chunks 2"))
FAULTS = ("kill", "exit", "raise", "no memory", "interrupt", "nan", "empty", "skew", "seed")
FAULTS += ("wrong codes", "wrong pairs", "wrong form")


@pytest.fixture
def longer_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these faults is detected by a time-out, so a busy machine gets more time."""
    monkeypatch.setattr(Spec, "timeout_s", 10.0)
    monkeypatch.setattr(campaign, "GRACE_S", 30.0)


@pytest.mark.parametrize("cases", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_random_faults_end_in_correct_result_or_error(cases: int, longer_timeouts: None) -> None:
    seed = random.SystemRandom().randrange(10**6)
    results = run(Campaign(seed, faults=FAULTS, scenes=SCENES), cases, 300.0, teams=1)
    bad = [f"{r.outcome}: seed {seed}, {r.case}\n{r.text}" for r in results if r.outcome in FAILURES]
    assert not bad, "\n".join(bad)
    assert sum(result.fired for result in results) >= cases // 2


@pytest.mark.slow
def test_falsified_message_error_names_faulty_rank(longer_timeouts: None) -> None:
    """Each lie is detected and names the rank: a deceived rank has no right numbers to continue with."""
    seed = random.SystemRandom().randrange(10**6)
    results = run(Campaign(seed, faults=tuple(OF_MESSAGES), scenes=SCENES), 15, 100.0, teams=1)
    bad = [
        f"{r.outcome}, named {r.named}: seed {seed}, {r.case}\n{r.text}"
        for r in results
        if r.fired and (r.outcome != CLEAN_ERROR or not r.named)
    ]
    assert not bad, "\n".join(bad)
    assert any(result.fired for result in results)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_one_minute_campaign_command_succeeds(tmp_path: Path) -> None:
    found = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "1", "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert json.loads(found.read_text())["cases"] > 1
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
