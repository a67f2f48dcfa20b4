"""`fusedmoe plan --scale`: predictions for 8 to 4,096 ranks, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusedmoe.cli.main import main
from fusedmoe.cli.scale import Scale
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule.machines import MACHINES, slowest_rank_factor
from fusedmoe.schedule.policies import POLICIES
from tests.cli.on_ranks import is_picture

MODEL = ["--model", "Mixtral-7B", "--layers", "2", "--schedule", "fsmoe"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def plan_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_scale_predicts_8_to_4096_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, make_figure = [], Scale.figure
    monkeypatch.setattr(Scale, "figure", lambda self: figures.append(make_figure(self)) or figures[-1])
    data = plan_json(capsys, *MODEL, "--machine", "dgx-h100", "--scale", "--png", str(tmp_path / "scale.png"))
    assert is_picture(tmp_path / "scale.png")
    chunks = figures[0].axes[-1]
    assert chunks.get_ylabel() == "mean chunks per layer"
    for most in (1.05, 2.4, 17.0):
        assert all(float(tick).is_integer() for tick in chunks.yaxis.get_major_locator().tick_values(0.0, most))
    assert data["machine"] == "dgx-h100" and data["policy"] == "fsmoe" and data["model"]["name"] == "Mixtral-7B"
    assert data["figures"]["cards"].keys() == {"value", "source", "estimate", "bounds"}
    assert [point["ranks"] for point in data["points"]] == [8 * 2**power for power in range(10)]
    for point in data["points"]:
        assert point.keys() == {
            *("ranks", "ranks_per_node", "ep", "esp", "mp", "dp", "sequential_s", "step_s", "speed_up", "exposed_s"),
            "tokens_per_s",
            *("sequential_exposed_s", "communication_s", "dense_after_s", "experts_s", "slowest", "chunks"),
        }
        assert point["ranks_per_node"] == 8 and point["dp"] * point["mp"] == point["ranks"]
        assert 8 % point["ep"] == 0 and point["esp"] == 8
        assert 0 < point["experts_s"] + 1e-12 <= point["exposed_s"] <= point["communication_s"]
        assert point["exposed_s"] < point["step_s"] and point["sequential_exposed_s"] < point["sequential_s"]
        assert point["speed_up"] == pytest.approx(point["sequential_s"] / point["step_s"]) and point["speed_up"] > 0.99
        assert point["slowest"] == pytest.approx(slowest_rank_factor(point["ranks"], 0.02))
        assert point["tokens_per_s"] == pytest.approx(1024 * point["dp"] / point["step_s"])  # of 1,024 tokens
        assert all(len(point["chunks"][phase]) == 2 and min(point["chunks"][phase]) >= 1 for phase in point["chunks"])
        assert (point["experts_s"] > 0) == (point["ranks"] > point["ep"] * point["esp"])
    steps = [point["step_s"] for point in data["points"]]
    assert steps == sorted(steps)  # constant work per rank
    # Given sizes start at the smallest world that fits them.
    sizes = ["--experts", "128", "--ep", "128", "--esp", "8", "--spread", "0"]
    even = plan_json(capsys, *MODEL, "--machine", "dgx-h100", "--scale", *sizes)
    assert [point["ranks"] for point in even["points"]] == [1024, 2048, 4096]
    assert all(one["slowest"] == pytest.approx(1) for one in even["points"]) and even["figures"]["spread"]["value"] == 0


def test_flags_change_the_nodes_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        *MODEL,
        "--machine",
        "dgx-h100",
        "--experts",
        "16",
        "--ep",
        "16",
        "--esp",
        "1",
        "--mp",
        "1",
        "--schedule",
        "fsmoe",
    ]
    own = plan_json(capsys, *flags, "--ranks", "16")
    changed = plan_json(
        capsys, *flags, "--ranks", "16", "--ranks-per-node", "4", "--nics", "2", "--nic-bandwidth", "100"
    )
    assert changed["layout"]["ranks_per_node"] == 4 and own["layout"]["ranks_per_node"] == 8
    assert changed["figures"]["cards"]["value"] == 2 and changed["figures"]["inter.bytes_per_s"]["value"] == 12.5e9
    assert "with 4 ranks per node, with 2 network cards per node, with 100 Gbit/s per card" in changed["machine"]
    # One card of 400 Gbit/s for each GPU, then half a card of 100: an eighth of the bandwidth.
    assert MACHINES["dgx-h100"].with_values(ranks_per_node=4).cards.value == 4  # one for each GPU, as before
    costs = [MACHINES["dgx-h100"], MACHINES["dgx-h100"].with_values(ranks_per_node=4, cards=2, card_bytes_per_s=12.5e9)]
    whole, eighth = (machine.costs(16, ep=16).lines["all-to-all/ep"].beta_s for machine in costs)
    assert eighth == pytest.approx(8 * whole * (12 / 16) / (8 / 16))
    scaled = plan_json(capsys, *flags[:-2], "--scale", "--ranks-per-node", "16", "--schedule", "fsmoe")
    assert scaled["points"][0]["ranks"] == 16


@pytest.mark.slow
def test_scale_for_one_rank_count_reports_layout_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--machine", "fsmoe-b", "--ranks", "32", "--spread", "0"]
    data = plan_json(capsys, *flags)
    assert data["layout"] == {"ranks": 32, "ranks_per_node": 4, "ep": 8, "esp": 4, "mp": 4, "dp": 8}
    assert data["figures"].keys() == dict(MACHINES["fsmoe-b"].figures()).keys()
    assert data["figures"]["spread"] == {"value": 0.0, "source": "as given", "estimate": False, "bounds": None}
    assert "not measured" in data["machine"] and data["policies_s"].keys() == POLICIES.keys()
    # The same testbed by its measured lines; only two of them differ.
    measured = plan_json(capsys, *MODEL, "--testbed", "B")
    assert data["step_s"] == pytest.approx(measured["step_s"], rel=0.05)
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "estimate" in out and "FSMoE Table 3" in out
    assert main(["plan", *MODEL, "--machine", "p4d-a100", "--scale", "--ep", "512", "--experts", "512"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out and "4096" in out and "speed-up" in out and "exposed" in out and "AWS, P4d" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--machine", "dgx-h200", "--ranks", "8"], "gb200-nvl72"),
        (["--machine", "dgx-h100"], "--ranks N"),
        (["--machine", "dgx-h100", "--ranks", "0"], "at least 1"),
        (["--machine", "dgx-h100", "--ranks", "12"], "nodes of 8"),
        (["--machine", "dgx-h100", "--ranks", "18", "--ranks-per-node", "4"], "nodes of 4"),
        (["--machine", "dgx-h100", "--ranks", "16", "--nics", "0"], "network cards per node = 0"),
        (["--machine", "dgx-h100", "--ranks", "16", "--nic-bandwidth", "nan"], "Gbit/s per card = nan"),
        (["--ranks", "16", "--nic-bandwidth", "100"], "--nic-bandwidth needs --machine NAME"),
        (["--machine", "dgx-h100", "--ranks", "16", "--dtype", "fp32"], "bf16"),
        (
            ["--machine", "dgx-h100", "--ranks", "48", "--ep", "3", "--esp", "8"],
            "8 experts are not divisible by ep = 3; set --ep to a divisor of 8",
        ),
        (["--machine", "dgx-h100", "--ranks", "64", "--esp", "8", "--hidden", "100"], "hidden dimension 100"),
        (["--machine", "dgx-h100", "--scale", "--ranks", "8"], "--scale chooses the numbers of ranks"),
        (["--machine", "dgx-h100", "--scale", "--ep", "8192"], "8192"),
        (["--machine", "dgx-h100", "--scale", "--placement", "fssdp"], "--scale supports --placement ep only"),
        (["--machine", "dgx-h100", "--ranks", "8", "--spread", "-1"], "spread"),
        (["--scale"], "--machine NAME"),
        (["--machine", "dgx-h100", "--testbed", "A"], "not allowed"),
    ],
)
def test_scale_rejects_invalid_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    try:
        code = main(["plan", *MODEL, *flags])
    except SystemExit as end:  # argparse errors
        code = end.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err
