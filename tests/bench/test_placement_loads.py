from __future__ import annotations

import json

import pytest

from bench.placement.__main__ import balanced
from bench.placement.loads import PERIODS, POLICIES, main
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.placement.placement import Placement

SMALL = ["--iterations", "8", "--layers", "2", "--experts", "12", "--ranks", "8", "--tokens", "500"]


def test_json_lists_every_policy(capsys):
    assert main([*SMALL, "--json", "--policy", "flexmoe"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["policies"]) == list(POLICIES) and (data["ranks"], data["ranks_per_node"]) == (8, 4)
    ep, ours = data["policies"]["ep"], data["policies"]["hecate"]
    assert ep["speedup"] == 1.0 and ours["straggler"] < ep["straggler"] and ours["layers_s"] < ep["layers_s"]
    assert data["policies"]["flexmoe"]["setting"] in {f"every {every}" for every in PERIODS} and ours["setting"] == ""
    assert data["policies"]["even"]["straggler_most"] < 1.05 < ours["straggler_most"]
    assert len(ours["layer_speedups"]) == 2 and ours["replicas"] <= 2 * 2 and ours["owned"] == 3
    layer = data["layer"]
    assert layer["policy"] == "flexmoe" and Placement.parse(layer["placement"]).experts == 12
    assert sum(layer["work_before"]) == sum(layer["work_after"]) == 8 * 500


def test_own_policy_is_added(capsys, tmp_path, monkeypatch):
    (tmp_path / "placements_of_a_user.py").write_text(
        "def mine(now):\n    return now.placement\n\ndef hecate(now):\n    return now.placement\n"
        "\ndef nothing(now):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*SMALL, "--json", "--policy", "placements_of_a_user:mine"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["policies"]) == [*POLICIES, "mine"] and data["layer"]["policy"] == "mine"
    assert data["policies"]["mine"] == data["policies"]["ep"]
    for name, text in (("nothing", "policy nothing: it returned a NoneType"), ("hecate", "another name"), ("no", "no")):
        assert main([*SMALL, "--policy", f"placements_of_a_user:{name}"]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*SMALL, "--policy", "mine"])
    assert "no policy 'mine'; choose from ep, " in capsys.readouterr().err


@pytest.mark.slow
def test_saved_loads_reproduce_output(capsys, tmp_path):
    path, picture = tmp_path / "counts.json", tmp_path / "loads.png"
    assert main([*SMALL, "--json", "--seed", "7", "--save", str(path)]) == 0
    made = capsys.readouterr().out
    assert LoadTrace.from_json(path.read_text()).tokens_ILWE.shape == (8, 2, 8, 12)
    assert main(["--trace", str(path), "--json", "--png", str(picture)]) == 0
    assert capsys.readouterr().out == made
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["--trace", str(path)]) == 0
    table = capsys.readouterr().out
    assert all(policy in table for policy in POLICIES)


def test_exact_balance_times_and_imbalance_are_reported():
    for name, one in balanced(8, 16).items():
        assert all(one[f"{what}_s"] > 0 for what in ("balance", "cheapest", "split"))
        assert 1 <= one["over_mean"] < 1.01 <= one["over_mean_before"] or name == "copies"
        assert (one["new_copies"] > 0) == (one["over_mean_before"] > one["over_mean"])
