"""Correctness checks: kernel tests, and kernels under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.gpu.exercise import PASSED
from bench.gpu.part import Outcome, Place, judge_exit, last_line
from bench.gpu.pool import run_tests
from bench.gpu.process import Ended

_TESTS = "tests/kernels/device"
_FALSE_ALARM = "known false alarm: lanes of a reduction that write the same place, Triton issue 7264"


def exercise(place: Place) -> Outcome:
    """Run every kernel once in its default configuration and compare with its definition in float64."""
    ended = place.run(["-m", "bench.gpu.exercise"], {"FUSEDMOE_AUTOTUNE": "0", "TRITON_INTERPRET": "0"}, silence_s=90.0)
    result = "unfinished" if ended.code is None else "passed" if PASSED in ended.output else "failed"
    word = last_line(ended.output) + (f"; {ended.why}" if ended.why else "")
    return Outcome(result, word, "" if result == "passed" else ended.output[-8000:])


def configurations(place: Place, at_once: int, dtypes: Sequence[str]) -> Outcome:
    """Check every configuration that the tuner may time, and write the verdicts to the results folder."""
    if place.rehearsal:
        return Outcome("skipped", "a CPU launches none of them; make aot compares their tiles in the interpreter")
    command = ["-m", "bench.gpu.verify", "--folder", str(place.stem.parent), "--at-once", str(at_once)]
    for dtype in dtypes:
        command += ["--dtype", dtype]
    return judge_exit(place.run(command, {"TRITON_INTERPRET": "0"}, silence_s=300.0))


def tests(place: Place, count: int) -> Outcome:
    """Run the kernel tests in `count` processes that share the GPU."""
    return run_tests(place, [_TESTS], count, most=1 if place.rehearsal else None)


def sanitizer(place: Place, tool: str) -> Outcome:
    """Run the exercise under a compute-sanitizer tool; racecheck without Gluon forms (`racecheck_gluon`)."""
    return _sanitize(place, tool, "bench.gpu.exercise", {"FUSEDMOE_GLUON": "0"} if tool == "racecheck" else {})


def racecheck_gluon(place: Place) -> Outcome:
    """Run racecheck on an empty warp-specialised kernel and, if it reports nothing, on the Gluon forms.

    Hazards in the empty kernel are false alarms, and then reports on the Gluon forms mean nothing: those are checked by
    memcheck and by `gluon_first stress`, which compares a hundred runs bitwise.
    """
    if place.rehearsal or torch.cuda.get_device_capability()[0] != 9:
        return Outcome("skipped", "the Gluon forms are for Hopper GPUs")
    empty = _sanitize(place, "racecheck", "bench.gpu.empty_warps", {})
    if empty.result in ("failed", "alarm"):
        return empty._replace(result="alarm", word=f"an empty warp-specialised kernel: {empty.word}: false alarms")
    if empty.result != "passed":
        return empty
    forms = _sanitize(place, "racecheck", "bench.gpu.exercise", {})
    return forms._replace(word=f"Gluon forms: {forms.word}; none in an empty warp-specialised kernel")


def _sanitize(place: Place, tool: str, module: str, forms: Mapping[str, str]) -> Outcome:
    """Run a module under a compute-sanitizer tool, excluding PyTorch's kernels (C++ names)."""
    program = find_sanitizer()
    if program is None:
        return Outcome("skipped", "there is no compute-sanitizer here")
    options = ["--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
    # PyTorch's caching allocator would hide out-of-bounds accesses inside its large blocks.
    ended = place.run_program(
        [program, *options, "--kernel-name-exclude", "kns=_ZN", sys.executable, "-m", module],
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FUSEDMOE_AUTOTUNE": "0", **forms},
    )
    outcome = judge_sanitizer(ended)
    # The tool finished, or was stopped by its timeout without a summary.
    looked = ended.code is None or "RACECHECK SUMMARY" in ended.output
    if tool == "racecheck" and outcome.result == "failed" and looked:
        return outcome._replace(result="alarm", word=f"{outcome.word} ({_FALSE_ALARM})")
    return outcome


def judge_sanitizer(ended: Ended) -> Outcome:
    """Derive the outcome from the tool's summary: errors fail, warnings are reported."""
    end = ended.output[-8000:]
    if ended.code is None:
        wrong = re.search(r"^=+ (Error: |Invalid ).*", ended.output, re.MULTILINE)
        return Outcome("failed", wrong[0].strip("= "), end) if wrong else Outcome("unfinished", "no error so far")
    if re.search(r"[Dd]evice not supported|before first instrumented API call", ended.output):
        return Outcome("skipped", "compute-sanitizer cannot watch this GPU here")
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: (.*)", ended.output)
    if summary is None or PASSED not in ended.output:
        return Outcome("failed", last_line(ended.output), end)
    errors = re.search(r"(\d+) errors?\b", summary[2])
    if errors is None or int(errors[1]) > 0:
        return Outcome("failed", summary[2], end)
    return Outcome("passed", summary[2])


def find_sanitizer() -> str | None:
    return _find("compute-sanitizer")


def profile(place: Place) -> Outcome:
    """Profile kernels of one shape with Nsight Compute, one in both forms; metrics are in the log."""
    program = _find("ncu")
    if program is None:
        return Outcome("skipped", "there is no ncu here")
    words, shape = [], "odd" if place.rehearsal else "30B-H1024"
    forms = (("up", "triton"), ("dW1", "triton"), ("dW1", "gluon"))
    # A rehearsal has no Gluon form.
    for kernel, form in forms[:2] if place.rehearsal else forms:
        name = {"up": "up_kernel", "dW1": "dweight_kernel"}[kernel]
        options = ["--clock-control", "none", "--set", "detailed", "--kernel-name", name, "--launch-count", "1"]
        once = [sys.executable, "-m", "bench.gpu.once", kernel, shape, "--form", form]
        ended = place.run_program([program, *options, *once], {"FUSEDMOE_AUTOTUNE": "0"}, who=kernel)
        found = re.findall(r"^\s+(Duration|Memory Throughput|Compute \(SM\) Throughput)\s+(.*)", ended.output, re.M)
        if ended.code or not found:
            return Outcome("skipped", f"{kernel}, {form}: {ended.why or last_line(ended.output)}", ended.output[-4000:])
        words.append(f"{kernel}, {form}: " + ", ".join(" ".join([label, *value.split()]) for label, value in found))
    return Outcome("passed", "; ".join(words))


def _find(name: str) -> str | None:
    beside_compiler = Path("/usr/local/cuda/bin") / name
    return shutil.which(name) or (str(beside_compiler) if beside_compiler.exists() else None)
