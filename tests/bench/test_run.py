"""Runs of parts, and suites in separate processes, on a CPU that fakes a GPU."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import steps, suites, training
from bench.gpu.kernels import KERNELS, PASSES
from bench.gpu.part import Log, Outcome, Part, Place
from bench.gpu.results import RESULTS
from bench.gpu.run import Run, main
from bench.gpu.spool import Spool
from bench.gpu.spread import PARTS
from bench.gpu.steps import PLANS, Plan, every_part, seconds
from bench.gpu.suites import measure


def test_spool_resumes_after_partial_line(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with spool.work("passes", "tiny", "quick"):
        pass
    with pytest.raises(ValueError), spool.work("passes", "tiny", "failing"):
        raise ValueError
    spool.add("begin", suite="passes", shape="odd", name="hung")
    spool.add("done", suite="kernels", shape="tiny")
    with (tmp_path / "spool").open("a") as file:
        file.write('{"event": "half a li')
    again = Spool(tmp_path / "spool")
    assert again.records == spool.records
    assert [work["name"] for work in again.unfinished()] == ["hung"]
    assert again.is_done("kernels", "tiny") and not again.is_done("passes", "tiny")
    assert again.left_out() == {"hung"}


def test_crashed_shape_is_retried_once() -> None:
    """A shape that ended a process is retried once, or at once if the failing variant can be left out."""
    spool = Spool()
    begin = {"suite": "passes", "shape": "tiny", "name": "passes"}
    spool.add("begin", **begin)
    assert spool.stops("passes", "tiny") == 1
    assert spool.is_open("passes", "tiny") and not spool.is_fresh("passes", "tiny")
    spool.add("begin", **{**begin, "name": "fusedmoe"})  # this variant cannot be left out
    assert spool.stops("passes", "tiny") == 1
    spool.add("begin", **{**begin, "name": "liger_kernel"})
    assert spool.stops("passes", "tiny") == 0 and spool.is_fresh("passes", "tiny")
    spool.add("begin", **begin)
    spool.add("lost", **{**begin, "name": "scattermoe"})
    assert spool.stops("passes", "tiny") == 0
    spool.add("begin", **begin)
    spool.add("begin", **begin)
    assert not spool.is_open("passes", "tiny") and spool.is_open("passes", "odd")
    assert spool.left_out() == {"fusedmoe", "liger_kernel", "scattermoe"}
    spool.add("failed", **{**begin, "shape": "odd"})
    assert not spool.is_open("passes", "odd")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """The place of a part in a rehearsal."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    deadline = time.monotonic() + 170
    return Place(tmp_path / "gpu", tmp_path, Log(tmp_path / "log"), 2, True, environment, who="it", deadline=deadline)


# Parts


def part(name: str, do: object, seconds: float = 5, *needs: str) -> Part:
    return Part(name, seconds, do, f"about {name}", needs)  # type: ignore[arg-type]


def good(place: Place) -> Outcome:
    return Outcome("passed", "well")


def test_failing_part_skips_only_its_dependents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(place: Place) -> Outcome:
        raise RuntimeError("out of luck")

    def wrong(place: Place) -> Outcome:
        return Outcome("failed", "one wrong", "all of its output")

    rounds = [
        [part("raises", raises), part("beside", good)],
        [part("wrong", wrong)],
        [part("alarm", lambda place: Outcome("alarm", "a race"))],
        [part("speed", good, 5, "wrong"), part("other", good, 5, "alarm")],
        [part("skipped", raises)],
    ]
    run = Run("try", Plan(1, "a try", rounds), tmp_path / "new", tmp_path)
    assert run.do(["skipped"]) == 1
    (file,) = (tmp_path / "new").glob("*.json")
    told = {found["name"]: found for found in json.loads(file.read_text())["parts"]}
    assert {name: found["result"] for name, found in told.items()} == {
        "raises": "failed",
        "beside": "passed",
        "wrong": "failed",
        "alarm": "alarm",
        "speed": "not run",
        "other": "passed",
        "skipped": "left out",
    }
    assert "RuntimeError: out of luck" in told["raises"]["output"] and told["wrong"]["output"] == "all of its output"
    assert "wrong failed" in told["speed"]["word"]
    text = file.with_suffix(".txt").read_text()
    assert "failed: one wrong" in text and text.strip() in capsys.readouterr().out
    assert "all of its output" in file.with_suffix(".log").read_text()
    assert Run("try", Plan(1, "", rounds[2:3]), tmp_path / "new", tmp_path).do() == 0


def test_plans_fit_time_budget_and_order_dependencies() -> None:
    assert {name: plan.minutes for name, plan in PLANS.items()} == {"all": 8.5, "1": 8.5, "2": 5, "3": 8.5, "4": 5}
    for plan in PLANS.values():
        assert 0.9 * 60 * plan.minutes < seconds(plan.rounds) <= 60 * plan.minutes
        names = [part.name for together in plan.rounds for part in together]
        assert len({*names}) == len(names)
        done: set[str] = set()
        for together in plan.rounds:
            assert all(set(part.needs) <= done for part in together)
            done |= {part.name for part in together}
    everything = {part.name for together in every_part().rounds for part in together}
    assert everything == {part.name for plan in PLANS.values() for together in plan.rounds for part in together}
    for plan in (PLANS["all"], PLANS["3"]):
        order = [part.name for together in plan.rounds for part in together]
        assert order.index("compile") < order.index("kernels") < order.index("passes")
    assert {part.name for part in PLANS["all"].rounds[-1]} == {"memcheck", "racecheck"}, "sanitizers come last"


def test_training_fails_on_wrong_rising_or_nan_loss() -> None:
    assert training.judge([5.6, 5.1], 5.601, 1e-3).result == "passed"
    for losses in ([5.7, 5.1], [5.6, 5.9], [5.6, float("nan"), 5.1], [float("nan"), 5.1]):
        assert training.judge(losses, 5.601, 1e-3).result == "failed", losses


# Suites


@pytest.mark.slow
def test_kernel_suite_runs_every_kernel_in_interpreter(place: Place) -> None:
    """Runs all kernels in Triton's interpreter; a shape's tensors are freed before the next shape."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, make bench-gpu calls them")
    assert measure(place, "kernels").result == "passed"
    spool = Spool(suites.rows_file(place))
    assert sorted(row["name"] for row in spool.of("row")) == sorted(2 * [name for name in KERNELS if name not in PARTS])
    assert [record["when"] for record in spool.of("ceilings")] == ["start", "end"]
    (file,) = place.stem.parent.glob("gpu_none_*.json")
    found = json.loads(file.read_text())
    assert found["rehearsal"] and all(row["fraction"] > 0 for row in found["rows"])


@pytest.mark.slow
def test_crashing_peer_is_excluded_without_losing_rows(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """The peer is left out from then on; no other row is lost or measured twice."""
    monkeypatch.setattr(suites, "pretending", lambda place, suite: {"PYTEST_ADDOPTS": "-p tests.bench.fake_gpu"})
    assert measure(place, "passes").result == "passed"
    spool = Spool(suites.rows_file(place))
    rows = [(row["shape"], row["variant"], row["name"]) for row in spool.of("row") if row["kind"] == "pass"]
    tiny = [("tiny", variant, name) for variant in ("fusedmoe", "torch._grouped_mm", "liger_kernel") for name in PASSES]
    odd = [("odd", variant, name) for variant in ("fusedmoe", "torch._grouped_mm") for name in PASSES]
    assert rows == tiny + odd
    words = {(record["shape"], record["name"]): record["word"] for record in spool.of("skipped")}
    assert words["odd", "liger_kernel"].startswith("did not come back: its process")
    assert words["tiny", "scattermoe"] == "not installed"
    (file,) = place.stem.parent.glob("gpu_none_*.json")
    assert len(json.loads(file.read_text())["rows"]) == len(spool.of("row"))


# Compilation and rehearsals


def test_rehearsal_rejects_results_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GPU is measured"):
        Run("try", PLANS["1"], RESULTS, tmp_path, rehearsal=True)


@pytest.mark.slow
def test_rehearsal_of_one_step_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rehearse the benchmark's step, without compiling or interpreting kernels."""
    before = sorted(RESULTS.iterdir())
    skip = ["compile", "kernels"]
    ends = signal.getsignal(signal.SIGTERM)
    assert main(["--rehearse", "--step", "3", "--out", str(tmp_path), "--skip", *skip]) == 0, capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is ends, "the caller's own again"
    text = capsys.readouterr().out
    assert "Nothing here was measured on a GPU" in text and "rows as they come" in text
    assert sorted(RESULTS.iterdir()) == before
    names = {path.suffix for path in tmp_path.iterdir()}
    assert names == {".json", ".txt", ".log", ".jsonl", ".md", ".png"} and len([*tmp_path.iterdir()]) == 7
    (file,) = tmp_path.glob("gpu_none_*.json")
    assert json.loads(file.read_text())["rehearsal"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rehearsal_of_remaining_parts_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearse the parts not covered above; estimate the first shape's compile time from measurements."""
    monkeypatch.setattr(steps, "REHEARSED_S", 15.0)
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is compiled where kernels are interpreted")
    skip = ["kernels", "passes", "report"]
    assert main(["--rehearse", "--out", str(tmp_path), "--skip", *skip]) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("rehearsal-*.json")
    told = {found["name"]: found for found in json.loads(file.read_text())["parts"]}
    assert {found["result"] for name, found in told.items() if name not in skip} <= {"passed", "skipped"}, told
    compiled = told["compile"]["found"]
    assert compiled["kernels"] > 50 and not compiled["errors"] and 0 < compiled["first_shape_s"] < 60
