"""Runs of parts, and the suites in processes of their own, on a CPU that pretends to be a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import precompile, steps, suites, training
from bench.gpu.kernels import KERNELS, PASSES
from bench.gpu.part import Log, Outcome, Part, Place
from bench.gpu.process import ROOT, Ended
from bench.gpu.results import RESULTS
from bench.gpu.run import Run, main
from bench.gpu.spool import Spool
from bench.gpu.spread import PARTS
from bench.gpu.steps import PLANS, Plan, every_part, seconds
from bench.gpu.suites import measure


def test_spool(tmp_path: Path) -> None:
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


def test_who_is_tried_again() -> None:
    """A shape at which a process has ended, once; one where a variant is to blame that is left out, at once."""
    spool = Spool()
    begin = {"suite": "passes", "shape": "tiny", "name": "passes"}
    spool.add("begin", **begin)
    assert spool.stops("passes", "tiny") == 1
    assert spool.is_open("passes", "tiny") and not spool.is_fresh("passes", "tiny")
    spool.add("begin", **{**begin, "name": "fusedmoe"})  # which cannot be left out
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
    """Of a part in a rehearsal."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    deadline = time.monotonic() + 170
    return Place(tmp_path / "gpu", tmp_path, Log(tmp_path / "log"), 2, True, environment, who="it", deadline=deadline)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the environment asks for going wrong."""
    monkeypatch.setattr(suites, "pretending", lambda place, suite: {"PYTEST_ADDOPTS": "-p tests.bench.fake_gpu"})


# --- Parts ---


def part(name: str, do: object, seconds: float = 5, *needs: str) -> Part:
    return Part(name, seconds, do, f"about {name}", needs)  # type: ignore[arg-type]


def good(place: Place) -> Outcome:
    return Outcome("passed", "well")


def test_no_part_stops_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_what_is_known_is_written_before_the_next_begins(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def reads(place: Place) -> Outcome:
        told = json.loads(place.file(".json").read_text())
        seen.append({found["name"]: found["result"] for found in told["parts"]})
        return Outcome("passed", "")

    Run("try", Plan(1, "", [[part("first", good)], [part("second", reads)]]), tmp_path, tmp_path).do()
    assert seen == [{"first": "passed", "second": "not run"}]


def test_time_that_is_left_goes_on(tmp_path: Path) -> None:
    left: list[float] = []

    def notes(place: Place) -> Outcome:
        left.append(place.left)
        return Outcome("passed", "")

    Run("try", Plan(10, "", [[part("one", notes, 20)], [part("two", notes, 40)]]), tmp_path, tmp_path).do()
    assert 190 < left[0] <= 200 and 590 < left[1] <= 600


def test_what_is_skipped_leaves_its_time(tmp_path: Path) -> None:
    left: list[float] = []

    def notes(place: Place) -> Outcome:
        left.append(place.left)
        return Outcome("passed", "")

    rounds = [[part("one", notes, 20)], [part("long", good, 1000)], [part("two", notes, 40)]]
    Run("try", Plan(10, "", rounds), tmp_path, tmp_path).do(["long"])
    assert 190 < left[0] <= 200 and 590 < left[1] <= 600


def test_a_short_run_has_time_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there takes as long to find out, whatever is measured afterwards."""
    left: list[float] = []

    def looks(place: Place, arguments: object, **others: object) -> Ended:
        left.append(place.left)
        return Ended(0, '{"gpu": {"name": "some"}, "versions": {}}', 0.0)

    monkeypatch.setattr(Place, "run", looks)
    (versions,), *_ = PLANS["1"].rounds
    assert Run("try", Plan(0.1, "", [[versions], [part("long", good, 500)]]), tmp_path, tmp_path).do() == 0
    assert 14 < left[0] <= 15


@pytest.mark.slow
def test_a_run_that_is_told_to_end(tmp_path: Path) -> None:
    """As by `timeout`: its processes end, and what was known is written."""
    script = f"""
import signal
from pathlib import Path
from bench.gpu import run
from bench.gpu.part import Outcome, Part
from bench.gpu.steps import Plan

signal.signal(signal.SIGTERM, run._end)
def sleeps(place):
    place.log.say("asleep")
    return Outcome("passed", place.run(["-c", "import time; time.sleep(300)"]).why)
quick = Part("quick", 5, lambda place: Outcome("passed", ""), "")
plan = Plan(5, "", [[quick], [Part("slow", 300, sleeps, "")]])
run.Run("try", plan, Path({str(tmp_path)!r}), Path({str(tmp_path)!r})).do()
"""
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "asleep" not in run.stdout.readline():
        pass
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 128 + signal.SIGTERM
    (file,) = tmp_path.glob("*.json")
    assert [found["result"] for found in json.loads(file.read_text())["parts"]] == ["passed", "not run"]


def test_plans_fit_their_time() -> None:
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


def test_training_is_judged() -> None:
    assert training.judge([5.6, 5.1], 5.601, 1e-3).result == "passed"
    for losses in ([5.7, 5.1], [5.6, 5.9], [5.6, float("nan"), 5.1], [float("nan"), 5.1]):
        assert training.judge(losses, 5.601, 1e-3).result == "failed", losses


# --- Suites ---


@pytest.mark.slow
def test_kernels_are_called_as_they_want(place: Place) -> None:
    """All of them, in Triton's interpreter; one shape's tensors are gone before the next."""
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
def test_a_shape_that_fails(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """It is told, once, and its tensors are gone all the same."""
    monkeypatch.setenv("FAKE_FAILURE", "1")
    outcome = measure(place, "passes")
    assert (outcome.result, outcome.word) == ("failed", "1 of 2 shapes; failed: tiny")
    assert "out of memory" in outcome.output
    spool = Spool(suites.rows_file(place))
    assert {row["shape"] for row in spool.of("row")} == {"odd"}
    assert len(spool.of("environment")) == 1 and spool.unfinished() == []


@pytest.mark.slow
def test_a_shape_that_costs_its_process_once(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """The others go on before it is tried again; results are there as they come."""
    monkeypatch.setenv("FAKE_DEATH", str(place.scratch / "marker"))
    outcome = measure(place, "passes")
    assert outcome.result == "passed", outcome
    spool = Spool(suites.rows_file(place))
    assert [record["shape"] for record in spool.of("done")] == ["odd", "tiny"]
    (skipped,) = [record for record in spool.of("skipped") if record["name"] == "passes"]
    assert skipped["shape"] == "tiny" and "its process ended with 9" in skipped["word"]


@pytest.mark.slow
def test_a_peer_that_costs_its_process(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """It is left out, from there on; nothing else is lost or measured twice."""
    monkeypatch.setenv("FAKE_PEER", "1")
    assert measure(place, "passes").result == "passed"
    spool = Spool(suites.rows_file(place))
    rows = [(row["shape"], row["variant"], row["name"]) for row in spool.of("row")]
    tiny = [("tiny", variant, name) for variant in ("fusedmoe", "torch._grouped_mm", "liger_kernel") for name in PASSES]
    odd = [("odd", variant, name) for variant in ("fusedmoe", "torch._grouped_mm") for name in PASSES]
    assert rows == tiny + odd
    words = {(record["shape"], record["name"]): record["word"] for record in spool.of("skipped")}
    assert words["odd", "liger_kernel"].startswith("did not come back: its process")
    assert words["tiny", "scattermoe"] == "not installed"
    (file,) = place.stem.parent.glob("gpu_none_*.json")
    assert len(json.loads(file.read_text())["rows"]) == len(rows)


# --- Compiling, and rehearsals ---


KERNELS_OF_TWO = (("up", "1"), ("up", "2"), ("down", ""), ("order", ""))


def test_the_estimate() -> None:
    """Of kernels that were compiled, their seconds; of others, those of their name, or of all. What failed or lay
    there already tells nothing."""
    standin = pytest.importorskip("bench.aot.standin")
    from bench.aot.compiling import Compiled

    up, up2, down, order = (standin.Launch("m", name, 90, data) for name, data in KERNELS_OF_TWO)
    wanted = {"first": [up, up2, order], "second": [down]}
    done = [Compiled(up, 4.0, False), Compiled(down, 2.0, False)]
    done += [Compiled(order, 0.1, True), Compiled(up2, 9.0, False, "bad")]
    found = precompile.estimate(wanted, done, 2)
    assert (found["measured"], found["mean_s"]) == (2, 3.0)
    assert found["first_shape_on_one_core_s"] == 4 + 4 + 3
    assert found["first_shape_s"] == found["all_shapes_s"] == 7
    assert precompile.estimate(wanted, [], 2) == {"measured": 0}


def test_time_on_many_workers() -> None:
    assert precompile.makespan_s([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert precompile.makespan_s([1.0] * 5, 16) == 1.0
    assert precompile.makespan_s([2.0, 2.0, 2.0], 1) == 6.0


def test_a_rehearsal_has_its_own_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GPU is measured"):
        Run("try", PLANS["1"], RESULTS, tmp_path, rehearsal=True)


@pytest.mark.slow
def test_a_short_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the benchmark's step, without what compiles and interprets kernels."""
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
def test_a_rehearsal_of_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of every part but those that tests above run; and how long it takes to compile for the first shape, from
    what was measured."""
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
