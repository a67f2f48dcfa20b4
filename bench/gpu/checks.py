"""Correctness, before anything is timed: the kernels' tests, and the kernels under compute-sanitizer.

All of them run side by side: they wait for compilers much more than for the GPU.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench.gpu.exercise import PASSED
from bench.gpu.process import Ended, Process

CHECKS = ("tests", "memcheck", "racecheck")
# Processes that share the GPU for the tests; each holds a context of half a gigabyte.
_WORKERS = 8


class Outcome(NamedTuple):
    """`result`: passed, skipped (could not be done here), unfinished (ran out of time) or failed."""

    result: str
    word: str


class Check(NamedTuple):
    """`start` gives a process, or the word why it cannot be started; `judge` says how it went."""

    start: Callable[[], Process | str]
    judge: Callable[[Ended], Outcome]


def start_tests() -> Process | str:
    spread = ["-n", str(_WORKERS)] if find_spec("xdist") else []
    return Process([sys.executable, "-m", "pytest", "tests/kernels", "-p", "no:cacheprovider", *spread])


def judge_tests(ended: Ended) -> Outcome:
    last = _last_line(ended.output)
    if ended.code is None:
        failing = re.findall(r"^(?:FAILED|ERROR).*|^[.sxX]*[FE]", ended.output, re.MULTILINE)
        return Outcome("failed", "stopped; some had failed") if failing else Outcome("unfinished", "none had failed")
    return Outcome("passed" if ended.code == 0 else "failed", last)


def start_sanitizer(tool: str) -> Process | str:
    """The exercise under one of compute-sanitizer's tools. Torch's own kernels (C++ names) are not watched."""
    program = find_sanitizer()
    if program is None:
        return "there is no compute-sanitizer here"
    options = ["--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
    # Torch's allocator would lend out parts of one large allocation, inside of which nothing is out of bounds.
    return Process(
        [program, *options, "--kernel-name-exclude", "kns=_ZN", sys.executable, "-m", "bench.gpu.exercise"],
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def judge_sanitizer(ended: Ended) -> Outcome:
    """Errors of the tool's summary count, warnings are only named."""
    if ended.code is None:
        wrong = re.search(r"^=+ (Error: |Invalid ).*", ended.output, re.MULTILINE)
        return Outcome("failed", wrong[0].strip("= ")) if wrong else Outcome("unfinished", "no error so far")
    if re.search(r"[Dd]evice not supported|before first instrumented API call", ended.output):
        return Outcome("skipped", "compute-sanitizer cannot watch this GPU here")
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: (.*)", ended.output)
    if summary is None or PASSED not in ended.output:
        return Outcome("failed", _last_line(ended.output))
    errors = re.search(r"(\d+) errors?\b", summary[2])
    if errors is None or int(errors[1]) > 0:
        return Outcome("failed", summary[2])
    return Outcome("passed", summary[2])


def find_sanitizer() -> str | None:
    beside_compiler = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(beside_compiler) if beside_compiler.exists() else None)


def checks() -> dict[str, Check]:
    return {
        "tests": Check(start_tests, judge_tests),
        "memcheck": Check(lambda: start_sanitizer("memcheck"), judge_sanitizer),
        "racecheck": Check(lambda: start_sanitizer("racecheck"), judge_sanitizer),
    }


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "it wrote nothing"
