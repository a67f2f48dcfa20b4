"""`fusedmoe trace`: a recorded step compared with its plan, in one process and over ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fusedmoe.cli.main import main
from fusedmoe.schedule.machines import TESTBEDS
from tests.cli.on_ranks import command, is_picture
from tests.cluster import Cluster
from tests.marks import slowly

TINY = ["--layers", "2", "--model-dim", "16", "--hidden", "8", "--experts", "4", "--seq-len", "16", "--batch", "2"]


def check_printed_ratio(out: str) -> None:
    """Check that the printed ratio is the ratio of the two times."""
    numbers = re.search(r"predicted ([\d.]+) ms, measured ([\d.]+) ms", out)
    ratio = re.search(r"measured / predicted: ([\d.]+)", out)
    assert numbers is not None and ratio is not None
    predicted, measured = map(float, numbers.groups())
    assert float(ratio[1]) == pytest.approx(measured / predicted, rel=0.1, abs=0.05)
    again = re.search(r"from measured task times: ([\d.]+) ms \(([+-][\d.]+)%\)", out)
    assert again is not None
    assert float(again[1]) / measured - 1 == pytest.approx(float(again[2]) / 100, rel=0.1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fsmoe", *slowly("off", "auto")])
def test_traced_step_is_compared_with_plan_on_ranks(cluster: Cluster, tmp_path: Path, schedule: str) -> None:
    (tmp_path / "costs.json").write_text(TESTBEDS["B"].costs.to_json())
    flags = [*TINY, "--ranks-per-node", "2", "--costs", "costs.json", "--schedule", schedule, "--steps", "3"]
    (code, out, error), *others = cluster.run(4, command, str(tmp_path), "trace", *flags)
    assert code == 0, error
    assert others == [(0, "", "")] * 3
    check_printed_ratio(out)
    assert "ep=2, esp=2" in out and f"schedule {schedule}" in out and "median of 3" in out
    measured = dict(re.findall(r"│ (\S+ (?:forward|backward)) +│ +\S+ │ +(\S+) │", out))
    parts = ("dispatch forward", "expert forward", "combine backward", "gradient-all-reduce backward")
    assert all(float(measured[part]) >= 0 for part in parts), out  # no dashes, also without a schedule
    assert re.search(r"exposed communication: predicted [\d.]+ ms, measured [\d.]+ ms \(\d+% of the step, mean", out)
    assert schedule != "auto" or re.search(r"schedule auto \(best prediction: .*\d chunks", out)
    assert re.search(r"spread of compute time over ranks: [\d.]+% .*--spread \d+\.\d+", out)
    assert is_picture(tmp_path / "trace.png")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["rank 0 (measured)", "rank 0 (predicted)"] + [
        f"rank {rank} (measured)" for rank in (1, 2, 3)
    ]
    kinds: dict[str, set[str]] = {name: set() for name in processes.values()}
    for event in events:
        if event["ph"] == "X":
            kinds[processes[event["pid"]]].add(event["args"]["kind"])
    moves = {"dispatch", "all-gather", "expert", "reduce-scatter", "combine"}
    assert moves | {"attention", "gradient-all-reduce"} <= kinds["rank 0 (predicted)"]
    gate = {"gate"} if schedule != "auto" else set()  # part of attention in micro-batches
    assert moves | gate | {"attention", "loss"} <= kinds["rank 3 (measured)"]
    assert all("optimizer" not in found for found in kinds.values())


def test_traced_step_is_compared_with_plan_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--budget", "0.5"]) == 0
    assert main(["trace", *TINY, "--steps", "1", "--png", "a.svg", "--json", "b.json"]) == 0
    out = capsys.readouterr().out
    check_printed_ratio(out)
    assert "middle" not in out
    assert "exposed communication: predicted 0.0 ms, measured 0.0 ms (0% of the step)" in out
    assert "schedule auto (no plan: no communication between ranks)" in out
    assert re.search(r"–: not predicted, or not measured", out) and "│         – │" in out
    assert (tmp_path / "a.svg").exists() and json.loads((tmp_path / "b.json").read_text())


def test_trace_rejects_invalid_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--steps", "0"]) == 2
    assert "--steps 0 must be at least 1" in capsys.readouterr().err
    assert main(["trace", "--costs", "nowhere"]) == 2
    assert "--costs nowhere: nowhere cannot be read: No such file" in capsys.readouterr().err
