"""Tests in several processes: a process that fails is named, and the remaining tests run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.gpu import pool
from bench.gpu.part import Log, Place
from bench.gpu.pool import judge, run_tests

CASES = """
import os, signal, time, warnings

import pytest


def test_a(): pass
def test_b_skipped(): pytest.skip("not here")
def test_c_fails(): assert 1 == 2
def test_d_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_e(): warnings.warn("up bfloat16 in 64x64x32 is not used: 3 values are wrong", RuntimeWarning)
def test_f_hangs(): time.sleep(300)
def test_g(): pass


def test_h_loses_the_gpu(monkeypatch):
    from bench.gpu import notes

    notes.gpu_works = lambda: False
    raise RuntimeError("an illegal memory access was encountered")


def test_i_after_it():
    from bench.gpu import notes

    assert notes.gpu_works()
"""


def place(folder: Path, seconds: float = 100) -> Place:
    return Place(folder / "gpu", folder, Log(folder / "log"), 2, who="tests", deadline=time.monotonic() + seconds)


@pytest.mark.slow
def test_pool_reports_failed_hung_and_crashed_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_TEST_S", 10)
    (tmp_path / "test_cases.py").write_text(CASES)
    outcome = run_tests(place(tmp_path), [str(tmp_path)], 2)
    assert outcome.result == "failed", outcome
    assert outcome.word.startswith("4 passed, 1 skipped, 2 failed, 2 did not end, 1 configurations not used: ")
    short = {key: sorted(name.split("::")[-1] for name in names) for key, names in outcome.found.items()}
    assert short["failed"] == ["test_c_fails", "test_h_loses_the_gpu"]
    assert short["did not end"] == ["test_d_dies", "test_f_hangs"]
    assert short["not used"] == ["up bfloat16 in 64x64x32 is not used: 3 values are wrong"]
    assert "assert 1 == 2" in outcome.output and "time.sleep(300)" in outcome.output, "where they stood"
    assert "its process ended with -9" in outcome.output
    log = (tmp_path / "log").read_text()
    assert "tests 0 | " in log and "tests 1 | " in log


@pytest.mark.slow
def test_collection_error_fails_pool(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    outcome = run_tests(place(tmp_path), [str(tmp_path)], 1)
    assert outcome.result == "failed" and "nothing_of_this_name" in outcome.output


def test_judge_counts_outcomes_and_unfinished_shares() -> None:
    def end(name: str, result: str) -> dict[str, object]:
        return {"event": "end", "name": name, "result": result, "text": ""}

    two = {"event": "collected", "count": 2}
    assert judge([[two, end("a", "passed"), two, end("b", "passed")], [two, end("c", "passed"), end("d", "skipped")]])[
        :2
    ] == ("passed", "3 passed, 1 skipped")
    assert judge([[two, end("a", "passed")]])[:2] == ("unfinished", "1 passed, 1 not run")
    assert judge([[two, end("a", "passed"), end("b", "passed")], []]).result == "unfinished", "a share never began"
    assert judge([[{"event": "collected", "count": 0}]])[:2] == ("failed", "no test was found")
