"""What the checks make of a tool's output, and processes that are watched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.checks import Check, Outcome, judge_sanitizer, judge_tests, start_sanitizer
from bench.gpu.exercise import PASSED
from bench.gpu.process import ROOT, Ended, Process, run_together
from bench.gpu.run import Run

WATCHED = f"========= COMPUTE-SANITIZER\nexercise: gate\n{PASSED}\n"


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        (0, WATCHED + "========= ERROR SUMMARY: 0 errors\n", "passed"),
        (0, WATCHED + "========= ERROR SUMMARY: 3 errors\n", "failed"),
        (0, WATCHED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "passed"),
        (0, WATCHED + "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", "passed"),
        (0, WATCHED + "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", "failed"),
        (1, "========= COMPUTE-SANITIZER\nexperts: off by 1.0e+00\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (0, PASSED + "\n", "failed"),
        (255, "========= Error: Device not supported. Please refer to the documentation\n", "skipped"),
        (255, "========= Error: Target application terminated before first instrumented API call\n", "skipped"),
        (None, WATCHED, "unfinished"),
        (None, WATCHED + "========= Invalid __global__ read of size 4 bytes\n", "failed"),
        (None, WATCHED + "========= Error: Race reported between Write access\n", "failed"),
        (1, "", "failed"),
    ],
)
def test_sanitizer(code: int | None, output: str, result: str) -> None:
    assert judge_sanitizer(Ended(code, output, 1.0)).result == result


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "....\n==== 300 passed, 2 skipped in 9.9s ====\n", Outcome("passed", "300 passed, 2 skipped in 9.9s")),
        (1, "..F.\nFAILED tests/x.py::y\n==== 1 failed ====\n", Outcome("failed", "1 failed")),
        (None, "bringing up nodes...\n......", Outcome("unfinished", "none had failed")),
        (None, "....F..", Outcome("failed", "stopped; some had failed")),
        (5, "no tests ran in 0.01s\n", Outcome("failed", "no tests ran in 0.01s")),
    ],
)
def test_tests(code: int | None, output: str, outcome: Outcome) -> None:
    assert judge_tests(Ended(code, output, 1.0)) == outcome


def test_processes_that_end_and_one_that_does_not(tmp_path: Path) -> None:
    child = tmp_path / "child"
    sleeper = f"import subprocess; p = subprocess.Popen(['sleep', '300']); open({str(child)!r}, 'w').write(str(p.pid))"
    processes = {
        "quick": Process([sys.executable, "-c", "import os; print(os.environ['WORD'])"], {"WORD": "hello"}),
        "slow": Process([sys.executable, "-c", f"{sleeper}; print('begun'); p.wait()"]),
    }
    told: list[str] = []
    ended = run_together(processes, 3.0, lambda name, ended: told.append(name))
    assert told == ["quick", "slow"]
    assert (ended["quick"].code, ended["quick"].output) == (0, "hello\n")
    assert (ended["slow"].code, ended["slow"].output) == (None, "begun\n")
    assert 3 <= ended["slow"].seconds < 30
    assert not is_running(int(child.read_text()))


def is_running(pid: int) -> bool:
    """False for one that has ended and that nobody has asked after."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_sanitizer_watches_the_exercise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a program of its name that shows what it is given, then does what it is told to."""
    monkeypatch.setattr("bench.gpu.checks.find_sanitizer", lambda: None)
    assert isinstance(start_sanitizer("memcheck"), str)
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$@" "caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"\nshift 8\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr("bench.gpu.checks.find_sanitizer", lambda: str(program))
    process = start_sanitizer("racecheck")
    assert isinstance(process, Process)
    ended = process.ended()
    first, *_, last = ended.output.splitlines()
    assert first.startswith("--tool racecheck ") and first.endswith(" -m bench.gpu.exercise caching=1")
    assert (ended.code, last) == (0, PASSED)


def test_the_exercise_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from bench.gpu import exercise

    def spoiled(*arguments: object) -> torch.Tensor:
        y_SM = right(*arguments)
        y_SM[7] = 0
        return y_SM

    right = exercise.gather_sum
    monkeypatch.setattr(exercise, "PARTS", (exercise.rows,))
    assert exercise.main(torch.device("cpu")) == []
    monkeypatch.setattr(exercise, "gather_sum", spoiled)
    assert any(fault.startswith("gather_sum: off by") for fault in exercise.main(torch.device("cpu")))


@pytest.mark.parametrize("result", ["failed", "passed"])
def test_a_failed_check_stops_the_run(
    result: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Check(lambda: Process([sys.executable, "-c", "print('one wrong')"]), lambda ended: Outcome(result, "a word"))
    absent = Check(lambda: "not here", judge_sanitizer)
    monkeypatch.setattr("bench.gpu.run.checks", lambda: {"tests": told, "memcheck": absent, "racecheck": told})
    monkeypatch.setattr(Run, "measure", lambda *_: measured.append(True) or True)
    measured: list[bool] = []
    assert Run(600).do(["racecheck"]) == 1  # nothing measured is no success either
    text = capsys.readouterr().out
    assert ("STOPPED" in text) == (result == "failed") == ("one wrong" in text) == (measured == [])
    assert "memcheck: skipped (not here)" in text and "racecheck: skipped (as asked for)" in text


def test_without_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """The command says what it needs, and the suites are skipped with a word."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 1 and "PyTorch finds none here" in done.stderr
