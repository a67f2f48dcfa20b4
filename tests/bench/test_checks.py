"""What the checks make of a tool's output, and processes that are watched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import checks
from bench.gpu.checks import judge_sanitizer, sanitizer
from bench.gpu.exercise import PASSED
from bench.gpu.part import Log, Place
from bench.gpu.process import ROOT, Ended, Process, watch

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


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "gpu", tmp_path, Log(), 2, who="part", deadline=time.monotonic() + 60)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_ends_and_one_that_does_not(tmp_path: Path) -> None:
    quick = Process([sys.executable, "-c", "import os; print(os.environ['WORD'])"], {"WORD": "hello"})
    assert watch(quick, 30)[:2] == (0, "hello\n")
    child, heard = tmp_path / "child", []
    slow = Process(["sh", "-c", f"sleep 300 & echo begun; echo $! >{child}.part; mv {child}.part {child}; wait"])
    until(child.exists)
    ended = watch(slow, 0.5, hear=heard.append)
    assert (ended.code, ended.output, "".join(heard)) == (None, "begun\n", "begun\n")
    assert 0.5 <= ended.seconds < 200 and "time was up" in ended.why
    until(lambda: not is_running(int(child.read_text())))  # a signal has been sent


@pytest.mark.slow
def test_silence_counts_from_the_last_sign_of_life() -> None:
    """Longer in all than it may be silent: lines keep it alive, or whatever else is a sign; then it falls silent."""
    talker = "for i in 0 1 2 3 4 5 6 7; do echo $i; sleep 0.5; done; sleep 300"
    ended = watch(Process(["sh", "-c", talker]), 60, silence_s=3.0)
    assert ended.code is None and ended.output.split() == [*"01234567"] and "no sign of life for 3 s" in ended.why
    silent = Process([sys.executable, "-c", "import time; time.sleep(4)"])
    assert watch(silent, 60, silence_s=1.0, sign=time.monotonic).code == 0


def test_one_that_is_stopped_with_the_run() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    ended = watch(Process(["sleep", "300"]), 60, stop=stop.is_set)
    assert ended.code is None and "the run was ended" in ended.why


def is_running(pid: int) -> bool:
    """False for one that has ended and that nobody has asked after."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def stub(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    """A program of this name, the only one that is found."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(checks, "_find", lambda wanted: str(program) if wanted == name else None)


@pytest.mark.slow
def test_the_sanitizer_watches_the_exercise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place) -> None:
    """By a program of its name that shows what it is given, then does what it is told to."""
    monkeypatch.setattr(checks, "_find", lambda name: None)
    assert sanitizer(place, "memcheck").result == "skipped"
    given = 'echo "$@" "caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"; shift 8; "$@" && echo "ERROR SUMMARY: $ERRORS errors"'
    stub(monkeypatch, tmp_path, "compute-sanitizer", given)
    monkeypatch.setenv("ERRORS", "3")
    outcome = sanitizer(place, "memcheck")
    first, *_ = outcome.output.splitlines()
    assert first.startswith("--tool memcheck ") and first.endswith(" -m bench.gpu.exercise caching=1")
    assert (outcome.result, outcome.word) == ("failed", "3 errors")


def test_an_alarm_of_racecheck_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place) -> None:
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


def test_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place) -> None:
    seen = 'echo "    Duration    us   41.2"; echo "    Memory Throughput   %  63.1"'
    stub(monkeypatch, tmp_path, "ncu", f'echo "$@"; {seen}')
    outcome = checks.profile(place)
    assert outcome.result == "passed"
    forms = ("up, triton", "dW1, triton", "dW1, gluon")
    assert outcome.word == "; ".join(f"{name}: Duration us 41.2, Memory Throughput % 63.1" for name in forms)
    stub(monkeypatch, tmp_path, "ncu", "echo no permission; exit 1")
    assert checks.profile(place)[:2] == ("skipped", "up, triton: no permission")


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


@pytest.mark.slow
def test_without_a_gpu() -> None:
    """The command says what it needs."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 1 and "PyTorch finds none here" in done.stderr
