"""The record of faults resumes after its last entry, and only with equal conditions, commit and code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cluster import survive
from bench.cluster.survive import FAULTS, Record, summary

WHERE: dict[str, Any] = {"commit": "c", "changed_files": 0, "date": "today", "load": 0.5}


def make_trial(number: int, **more: Any) -> dict[str, Any]:
    fine = {"from": "memory", "worst_difference": 1e-9 * number, "seconds_to_go_on": float(number)}
    return {"number": number, "fault": FAULTS[number % len(FAULTS)], **fine, **more}


def test_record_resumes_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = dict(WHERE)
    monkeypatch.setattr(survive, "provenance", lambda measured: dict(where))
    path = tmp_path / "survive.json"
    first = Record(path, {"seed": 1})
    first.note(price={"memory": 3.0})
    first.note(make_trial(0))
    first.note(make_trial(1))
    second = Record(path, {"seed": 1})
    assert [one["number"] for one in second.trials] == [0, 1] and second.price == {"memory": 3.0}
    second.note(make_trial(2))
    found = json.loads(path.read_text())
    assert len(found["trials"]) == 3 and [piece["faults"] for piece in found["pieces"]] == [2, 1]
    for changes, conditions in (({}, {"seed": 2}), ({"commit": "d"}, {"seed": 1}), ({"changed_files": 1}, {"seed": 1})):
        where.update(WHERE | changes)
        assert Record(path, conditions).trials == []
    assert json.loads(path.read_text()) == found, "nothing is lost before there is something new"


def test_failed_trials_are_excluded_from_medians() -> None:
    trials = [make_trial(number) for number in range(15)] + [
        make_trial(15, problem="another number of ranks", **{"from": "?"})
    ]
    killed = summary(trials)["rank killed"]
    assert (killed["faults"], killed["went_on"], killed["from"]) == (4, 3, {"memory": 3})
    assert killed["seconds_to_go_on"] == {"median": 5.0, "min": 0.0, "max": 10.0}
    assert summary([])["node killed"] == {"faults": 0, "went_on": 0}
