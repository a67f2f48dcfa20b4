"""`--policy MODULE:FUNCTION` of the simulation and of the cluster benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cluster.__main__ import _options
from bench.cluster.own import parts_text
from bench.own_policy import EXAMPLE, VARIABLE, policy_environment, register_from_environment, register_own
from bench.simulate import grid
from bench.simulate.__main__ import _print_table, main
from fusedmoe import register_policy
from fusedmoe.errors import ConfigError
from fusedmoe.schedule import Plan, StepCosts, Workload
from fusedmoe.schedule.cost import NO_CONTENTION
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
        found = data[testbed]["ideal"]
        assert found["copied"] == pytest.approx(found["sequential"], rel=1e-9 if not whole else 1)
        assert found["sampled"]["copied"] == pytest.approx(found["sampled"]["sequential"], rel=1e-9)
        assert found["sampled"]["joint"] == found["joint"] and found["cases"]["copied"] == (1 if whole else 486)


@pytest.mark.parametrize("whole", [False, True])
def test_piped_table_compares_the_policy_in_the_sample(capsys: Any, whole: bool) -> None:
    seconds = {name: np.array([1.0, 2.0, 1.0]) for name in (*grid.COLUMNS, *grid.ABLATION, grid.BASELINE)}
    for name in ("lancet", "flowmoe", "joint", "bound", *grid.ABLATION, *["my_policy"] * whole):
        seconds[name] = np.array([1.0, np.nan, np.nan])
    seconds = {"my_policy": np.array([0.5, 1.0, 1.0])} | seconds
    _print_table([grid.Result(name, 1.0, seconds, 0, "my_policy") for name in ("A", "B")], 4, [])
    lines = capsys.readouterr().out.splitlines()
    second = next(number for number, line in enumerate(lines) if "sequential" in line)
    above, below = ([cell.strip() for cell in lines[number].split("┃")] for number in (second - 1, second))
    sampled = ["lancet", "flowmoe", "joint", "bound", "my_policy"]
    assert [name for name, text in zip(above, below, strict=True) if text == "n=1"] == sampled
    assert ("my_policy" in below) == (not whole) and "fsmoe no iio" in below
    if not whole:
        row = next(line for line in lines if "A ideal" in line).split("│")
        assert [cell.strip() for cell in row[-4:-2]] == ["1.667", "2.000"]


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
    monkeypatch.setattr(
        sys, "argv", ["bench.cluster", "--policy", EXAMPLE, "--results", str(tmp_path), "--settings", "layer"]
    )
    assert _options().policy == EXAMPLE and "half_a_millisecond" in POLICIES


POLICIES_OF_A_USER = """
from fusedmoe.schedule import ChunkedPass, StepSplit, micro_schedule, step_plan, three_queues

def one_pass(workload, costs):
    return step_plan(costs, *[[ChunkedPass(three_queues, 2)]] * 2)

def no_plan(workload, costs):
    pass

def raises(workload, costs):
    return costs.layerz

def seventeen(workload, costs):
    return step_plan(costs, *[[ChunkedPass(three_queues, 17)] * len(costs.layers)] * 2)

def nine(workload, costs):
    return step_plan(costs, *[[ChunkedPass(three_queues, 9)] * len(costs.layers)] * 2)

def two_micro(workload, costs):
    return micro_schedule(costs, StepSplit(2, 2)).plan()
"""


@pytest.fixture
def my_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "policies_of_a_user.py").write_text(POLICIES_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    return "policies_of_a_user"


def cluster_options(monkeypatch: pytest.MonkeyPatch, folder: Path, policy: str, settings: str) -> Any:
    flags = ["--policy", policy, "--results", str(folder), "--settings", *settings.split()]
    monkeypatch.setattr(sys, "argv", ["bench.cluster", *flags])
    return _options()


@pytest.mark.parametrize(
    ("policy", "settings", "text"),
    [
        ("one_pass", "emulated:model", "emulated:model: policy one_pass: step_plan: 1 forward passes for 3 layers"),
        ("one_pass", "layer:layer computed:job", "computed:job: policy one_pass: step_plan: 1 forward passes for 2"),
        ("no_plan", "layer:layer", "layer:layer: policy no_plan: it returned a NoneType, no Plan"),
        (
            "raises",
            "layer:layer",
            "policy raises: AttributeError: 'StepCosts' object has no attribute 'layerz' (policies",
        ),
        ("seventeen", "layer:layer", "the forward pass of layer 0 has 17 chunks, more than limit = 16"),
        ("nine", "emulated:layer,steps", "emulated:steps: policy nine: the forward pass of layer 0 has 9 chunks"),
        ("two_micro", "layer:layer", "for micro-batches through whole layers, add --whole"),
        (
            "two_micro",
            "layer:layer --whole",
            "--whole: no selected part compares it; choose from --settings computed:job",
        ),
        ("seventeen", "layer:shared", "without --whole: no selected part compares it"),
    ],
)
def test_cluster_refuses_a_wrong_policy_at_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    tmp_path: Path,
    my_policies: str,
    policy: str,
    settings: str,
    text: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        cluster_options(monkeypatch, tmp_path, f"{my_policies}:{policy}", settings)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and text in error
    assert error.startswith("bench.cluster: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("policy", "settings", "parts"),
    [
        ("one_pass", "layer", "layer:layer"),
        ("nine", "emulated:layer,model computed:job,price", "emulated:layer emulated:model computed:job"),
        ("two_micro", "layer blocks computed:job --whole", "blocks:model computed:job"),
    ],
)
def test_cluster_accepts_complete_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, my_policies: str, policy: str, settings: str, parts: str
) -> None:
    options = cluster_options(monkeypatch, tmp_path, f"{my_policies}:{policy}", settings)
    assert parts_text(options.settings, options.whole) == parts


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("raises", "policy raises: AttributeError: 'StepCosts' object has no attribute 'layerz'"),
        ("two_micro", "policy two_micro: micro-batches: the layer cannot be split"),
    ],
)
def test_simulation_calls_the_policy_at_start(capsys: Any, my_policies: str, policy: str, text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--grid", "fsmoe", "--policy", f"{my_policies}:{policy}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"bench.simulate: {text}") and error.count("\n") == 1
    assert ("add --whole" in error) == (policy == "two_micro")


def test_simulated_layer_policies_see_costs_without_micro_batches() -> None:
    seen = []

    def mine(workload: Workload, costs: StepCosts) -> Plan:
        seen.append(costs.can_split)
        return POLICIES["sequential"].plan(costs)

    register_policy("mine", mine)
    list(grid._rows(next(grid.sample_costs(1)), (NO_CONTENTION,), "mine"))
    assert seen == [False]


def test_simulation_ends_with_the_error() -> None:
    command = [sys.executable, "-m", "bench.simulate", "--grid", "fsmoe", "--policy", "nothing:here"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (ended.returncode, ended.stderr) == (2, "bench.simulate: --policy nothing:here: No module named 'nothing'\n")
