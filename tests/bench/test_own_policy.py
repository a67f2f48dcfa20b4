"""`--policy MODULE:FUNCTION` of the simulation and of the cluster benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.__main__ import _options
from bench.own_policy import EXAMPLE, VARIABLE, policy_environment, register_from_environment, register_own
from bench.simulate.__main__ import main
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.policies import POLICIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_simulation_adds_a_column(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any, whole: bool
) -> None:
    (tmp_path / "my_policies.py").write_text(
        "from fusedmoe.schedule.policies import POLICIES\n\n\n"
        "def copied(workload, costs):\n    return POLICIES['sequential'].plan(costs)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--grid", "fsmoe", "--json", "--layers", "1", "--sample", "1", "--policy", "my_policies:copied"]
    main([*arguments, *["--whole"] * whole])
    data = json.loads(capsys.readouterr().out)
    for testbed in ("A", "B"):
        assert data[testbed]["ideal"]["copied"] == pytest.approx(
            data[testbed]["ideal"]["sequential"], rel=1e-9 if not whole else 1
        )


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("nothing", "expected MODULE:FUNCTION, such as examples.own_policy:half_a_millisecond"),
        ("nothing:here", "No module named 'nothing'"),
        ("os:nothing", "has no attribute 'nothing'"),
        ("os:sep", "'sep' is a str; expected a function"),
    ],
)
def test_unusable_policies_are_rejected(policy: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        register_own(policy, False)


def test_ranks_register_the_policy_from_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy_environment(None, True) == {}
    for whole in (False, True):
        monkeypatch.setenv(VARIABLE, policy_environment(EXAMPLE, whole)[VARIABLE])
        register_from_environment()
        assert POLICIES["half_a_millisecond"].uses_micro_batches == whole


def test_results_of_own_policies_are_kept_apart(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.cluster", "--policy", EXAMPLE])
    with pytest.raises(SystemExit):
        _options()
    assert "choose another --results folder" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench.cluster", "--policy", EXAMPLE, "--results", str(tmp_path)])
    assert _options().policy == EXAMPLE and "half_a_millisecond" in POLICIES


def test_simulation_ends_with_the_error() -> None:
    command = [sys.executable, "-m", "bench.simulate", "--grid", "fsmoe", "--policy", "nothing:here"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (ended.returncode, ended.stderr) == (1, "bench.simulate: --policy nothing:here: No module named 'nothing'\n")
