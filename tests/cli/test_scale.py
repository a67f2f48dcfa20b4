"""`fusedmoe plan --scale`: predictions for 8 to 4,096 ranks, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusedmoe.cli.main import main
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule.machines import MACHINES, slowest_of
from fusedmoe.schedule.policies import POLICIES
from tests.cli.on_ranks import is_picture

MODEL = ["--model", "Mixtral-7B", "--layers", "2", "--schedule", "fsmoe"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_from_8_to_4096_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = planned(capsys, *MODEL, "--machine", "dgx-h100", "--scale", "--png", str(tmp_path / "scale.png"))
    assert is_picture(tmp_path / "scale.png")
    assert data["machine"] == "dgx-h100" and data["policy"] == "fsmoe" and data["model"]["name"] == "Mixtral-7B"
    assert data["figures"]["cards"].keys() == {"value", "source", "estimate"}
    assert [point["ranks"] for point in data["points"]] == [8 * 2**power for power in range(10)]
    for point in data["points"]:
        assert point.keys() == {
            *("ranks", "ranks_per_node", "ep", "esp", "mp", "dp", "sequential_s", "step_s", "speed_up", "exposed_s"),
            *("sequential_exposed_s", "communication_s", "experts_s", "slowest", "chunks"),
        }
        assert point["ranks_per_node"] == 8 and point["dp"] * point["mp"] == point["ranks"]
        assert 8 % point["ep"] == 0 and point["esp"] == 8
        assert 0 < point["experts_s"] + 1e-12 <= point["exposed_s"] <= point["communication_s"]
        assert point["exposed_s"] < point["step_s"] and point["sequential_exposed_s"] < point["sequential_s"]
        assert point["speed_up"] == pytest.approx(point["sequential_s"] / point["step_s"]) and point["speed_up"] > 0.99
        assert point["slowest"] == pytest.approx(slowest_of(point["ranks"], 0.02))
        assert all(len(point["chunks"][phase]) == 2 and min(point["chunks"][phase]) >= 1 for phase in point["chunks"])
        assert (point["experts_s"] > 0) == (point["ranks"] > point["ep"] * point["esp"])
    steps = [point["step_s"] for point in data["points"]]
    assert steps == sorted(steps)  # the work of a rank stays the same
    # Sizes that are asked for begin where they fit.
    sizes = ["--experts", "128", "--ep", "128", "--esp", "8", "--spread", "0"]
    even = planned(capsys, *MODEL, "--machine", "dgx-h100", "--scale", *sizes)
    assert [point["ranks"] for point in even["points"]] == [1024, 2048, 4096]
    assert all(one["slowest"] == pytest.approx(1) for one in even["points"]) and even["figures"]["spread"]["value"] == 0


@pytest.mark.slow
def test_one_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--machine", "fsmoe-b", "--ranks", "32", "--spread", "0"]
    data = planned(capsys, *flags)
    assert data["layout"] == {"ranks": 32, "ranks_per_node": 4, "ep": 8, "esp": 4, "mp": 4, "dp": 8}
    assert data["figures"].keys() == dict(MACHINES["fsmoe-b"].figures()).keys()
    assert data["figures"]["spread"] == {"value": 0.0, "source": "as given", "estimate": False}
    assert "not measured" in data["machine"] and data["policies_s"].keys() == POLICIES.keys()
    # The same testbed by its measured lines, of which only two differ.
    measured = planned(capsys, *MODEL, "--testbed", "B")
    assert data["step_s"] == pytest.approx(measured["step_s"], rel=0.05)
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "estimate" in out and "FSMoE Table 3" in out
    assert main(["plan", *MODEL, "--machine", "p4d-a100", "--scale", "--ep", "512", "--experts", "512"]) == 0
    out = capsys.readouterr().out
    assert "4096" in out and "speed-up" in out and "exposed" in out and "AWS, P4d" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--machine", "dgx-h200", "--ranks", "8"], "gb200-nvl72"),
        (["--machine", "dgx-h100"], "--ranks N"),
        (["--machine", "dgx-h100", "--ranks", "0"], "at least 1"),
        (["--machine", "dgx-h100", "--ranks", "12"], "nodes of 8"),
        (["--machine", "dgx-h100", "--ranks", "16", "--ranks-per-node", "4"], "nodes have 8"),
        (["--machine", "dgx-h100", "--ranks", "16", "--dtype", "fp32"], "bf16"),
        (["--machine", "dgx-h100", "--ranks", "48", "--ep", "3", "--esp", "8"], "8 experts do not divide"),
        (["--machine", "dgx-h100", "--ranks", "64", "--esp", "8", "--hidden", "100"], "hidden dim 100"),
        (["--machine", "dgx-h100", "--scale", "--ranks", "8"], "by itself"),
        (["--machine", "dgx-h100", "--scale", "--ep", "8192"], "8192"),
        (["--machine", "dgx-h100", "--scale", "--placement", "fssdp"], "stay"),
        (["--machine", "dgx-h100", "--ranks", "8", "--spread", "-1"], "spread"),
        (["--scale"], "--machine NAME"),
        (["--machine", "dgx-h100", "--testbed", "A"], "not allowed"),
    ],
)
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    try:
        code = main(["plan", *MODEL, *flags])
    except SystemExit as end:  # what argparse finds
        code = end.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err
