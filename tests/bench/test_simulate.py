from __future__ import annotations

import json
from itertools import islice

import pytest

from bench.simulate import grid
from bench.simulate.__main__ import main
from bench.simulate.grid import COLUMNS


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    whole = grid.workloads
    monkeypatch.setattr(grid, "workloads", lambda testbed: islice(whole(testbed), 0, None, 61))


@pytest.mark.slow
def test_json_has_every_column_and_ablation(capsys):
    main(["--grid", "fsmoe", "--json", "--layers", "2", "--sample", "1"])
    data = json.loads(capsys.readouterr().out)
    assert data["layers"] == 2 and any("2 equal layers" in text for text in data["assumptions"])
    for testbed in ("A", "B"):
        for name in ("ideal", "calibrated"):
            found = data[testbed][name]
            assert all(isinstance(found[column], float) for column in COLUMNS)
            assert list(found["ablation"]) == ["pipelined experts", "attention", "all-reduce", "tuned"]
            assert found["ablation"]["tuned"] == found["flowmoe"]
            assert isinstance(found["differing_degrees"], int)
            assert found["cases"]["fsmoe"] == 8 and found["cases"]["joint"] == found["cases"]["tuned"] == 1
            assert 0 <= found["gap_to_bound"]["mean"] <= found["gap_to_bound"]["p100"]
        assert data[testbed]["published"]["layers"] == 4
        assert data[testbed]["ideal"]["fsmoe"] > data[testbed]["calibrated"]["fsmoe"]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 4])
def test_table_marks_sampled_columns_and_has_published_rows_for_the_papers_layers(capsys, layers):
    main(["--grid", "fsmoe", "--layers", str(layers), "--sample", "1"])
    out = capsys.readouterr().out
    assert all(row in out for row in ("A ideal", "B calibrated", "over Tutel, n=1", "the bound, n=1"))
    assert out.count("n=1") == 6  # two titles; columns lancet, flowmoe, joint and bound
    assert ("A published" in out) == (layers == 4)
    assert ("published rows: only with --layers 4" in out) == (layers != 4)
