"""How the checks read a tool's output, and supervised processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import checks
from bench.gpu.checks import judge_sanitizer, sanitizer
from bench.gpu.exercise import PASSED
from bench.gpu.part import Log, Place
from bench.gpu.process import Ended, Process, watch

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
def test_sanitizer_output_is_classified(code: int | None, output: str, result: str) -> None:
    assert judge_sanitizer(Ended(code, output, 1.0)).result == result


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "gpu", tmp_path, Log(), 2, who="part", deadline=time.monotonic() + 60)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_watch_returns_output_and_kills_at_timeout(tmp_path: Path) -> None:
    quick = Process([sys.executable, "-c", "import os; print(os.environ['WORD'])"], {"WORD": "hello"})
    assert watch(quick, 30)[:2] == (0, "hello\n")
    child, heard = tmp_path / "child", []
    slow = Process(["sh", "-c", f"sleep 300 & echo begun; echo $! >{child}.part; mv {child}.part {child}; wait"])
    wait_until(child.exists)
    ended = watch(slow, 0.5, hear=heard.append)
    assert (ended.code, ended.output, "".join(heard)) == (None, "begun\n", "begun\n")
    assert 0.5 <= ended.seconds < 200 and "time was up" in ended.why
    wait_until(lambda: not is_running(int(child.read_text())))  # the signal is asynchronous


def is_running(pid: int) -> bool:
    """False also for a zombie, which has ended but was not reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def stub(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    """Create a program of this name, the only program that `_find` returns."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(checks, "_find", lambda wanted: str(program) if wanted == name else None)


@pytest.mark.slow
def test_sanitizer_runs_exercise_under_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place) -> None:
    """A stub of the sanitizer prints its arguments, then runs the given command."""
    monkeypatch.setattr(checks, "_find", lambda name: None)
    assert sanitizer(place, "memcheck").result == "skipped"
    given = 'echo "$@" "caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"; shift 8; "$@" && echo "ERROR SUMMARY: $ERRORS errors"'
    stub(monkeypatch, tmp_path, "compute-sanitizer", given)
    monkeypatch.setenv("ERRORS", "3")
    outcome = sanitizer(place, "memcheck")
    first, *_ = outcome.output.splitlines()
    assert first.startswith("--tool memcheck ") and first.endswith(" -m bench.gpu.exercise caching=1")
    assert (outcome.result, outcome.word) == ("failed", "3 errors")


def test_racecheck_hazard_is_alarm_not_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place) -> None:
    summary = "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    stub(monkeypatch, tmp_path, "compute-sanitizer", f'echo "{PASSED}"; echo "{summary}"')
    outcome = sanitizer(place, "racecheck")
    assert outcome.result == "alarm" and "1 error" in outcome.word and "issue 7264" in outcome.word
    late = Ended(None, "========= Error: Race reported between Read access at up_kernel", 81.0, "its time was up")
    with monkeypatch.context() as patched:
        patched.setattr(Place, "run_program", lambda *arguments, **others: late)
        outcome = sanitizer(place, "racecheck")
        assert outcome.result == "alarm" and "Race reported" in outcome.word
        assert sanitizer(place, "memcheck").result == "failed"
    stub(monkeypatch, tmp_path, "compute-sanitizer", "echo experts: off by 1.0e+00; exit 1")
    assert sanitizer(place, "racecheck").result == "failed"


@pytest.mark.parametrize("hazards", [0, 1])
def test_gluon_hazards_are_false_alarms_if_an_empty_kernel_has_them(
    hazards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    assert checks.racecheck_gluon(replace(place, rehearsal=True)).result == "skipped"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    empty = f'echo "RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)"'
    forms = 'echo "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"'
    script = f'echo "{PASSED}"; case "$*" in *empty_warps*) {empty};; *) {forms};; esac'
    stub(monkeypatch, tmp_path, "compute-sanitizer", script)
    outcome = checks.racecheck_gluon(place)
    expected = "an empty warp-specialised kernel: 1 hazards" if hazards else "Gluon forms: 2 hazards"
    assert outcome.result == "alarm" and outcome.word.startswith(expected)


def test_exercise_detects_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
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
