from __future__ import annotations

import json
from itertools import islice

import pytest

from fusedmoe.cli.main import main
from fusedmoe.schedule import grid
from fusedmoe.schedule.grid import COLUMNS
from fusedmoe.schedule.policies import POLICIES


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    whole = grid.workloads
    monkeypatch.setattr(grid, "workloads", lambda testbed: islice(whole(testbed), 0, None, 61))


def test_json(capsys):
    assert main(["simulate", "--grid", "fsmoe", "--json", "--layers", "2", "--sample", "1"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layers"] == 2 and any("2 equal layers" in text for text in data["assumptions"])
    for testbed in ("A", "B"):
        for name in ("ideal", "calibrated"):
            found = data[testbed][name]
            assert all(isinstance(found[column], float) for column in COLUMNS)
            assert list(found["ablation"]) == ["pipelined experts", "attention", "all-reduce", "tuned"]
            assert found["ablation"]["tuned"] == found["flowmoe"]
            assert isinstance(found["differing_degrees"], int)
            assert 0 <= found["gap_to_bound"]["mean"] <= found["gap_to_bound"]["p100"]
        assert data[testbed]["ideal"]["fsmoe"] > data[testbed]["calibrated"]["fsmoe"]


def test_table(capsys):
    assert main(["simulate", "--grid", "fsmoe", "--layers", "1", "--sample", "1"]) == 0
    out = capsys.readouterr().out
    for part in ("A ideal", "B calibrated", "A published", "1.18", "912", "· Coefficients"):
        assert part in out


def test_help_lists_the_policies(capsys):
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and all(name in out for name in POLICIES)


def test_a_step_without_layers_is_refused(capsys):
    assert main(["simulate", "--grid", "fsmoe", "--layers", "0"]) == 2
    assert "at least one layer" in capsys.readouterr().err
    assert main(["simulate", "--grid", "fsmoe", "--sample", "0"]) == 2
    assert "at least one case" in capsys.readouterr().err
