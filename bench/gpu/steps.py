"""Plans of runs: a full run, and four steps of half an hour for a new GPU.

A plan is a list of rounds, whose parts run in parallel. Later rounds may use the remaining time of earlier ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bench.gpu import checks, suites, training
from bench.gpu.part import Outcome, Part, Place, judge_exit
from bench.gpu.precompile import WORKERS, precompile

Rounds = Sequence[Sequence[Part]]
# Processes that compile while others run, and test processes, each with a GPU context of half a gigabyte.
_BESIDE, _TESTS = 8, 12
# Time limit for querying versions.
_VERSIONS_S = 15.0
#: Compile time of a rehearsal, to estimate the time per kernel.
REHEARSED_S = 45.0


class Plan(NamedTuple):
    """Plan of a run. `minutes`: total time. `about`: one-line description."""

    minutes: float
    about: str
    rounds: Rounds


def versions(place: Place) -> Outcome:
    """Query versions, and check that a process can use the GPU."""
    # Constant duration, even in a short run.
    place = place.of(place.who, max(place.deadline, time.monotonic() + _VERSIONS_S))
    outcome = judge_exit(place.run(["-m", "bench.gpu.device"], silence_s=60.0))
    if outcome.result != "passed":
        return outcome
    found = json.loads(outcome.word)
    if found["gpu"] is None and not place.rehearsal:
        return Outcome("failed", "PyTorch finds no GPU here")
    told = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return Outcome("passed", f"{found['gpu']['name'] if found['gpu'] else 'no GPU'}; {told}", found=found)


def compile_all(place: Place, workers: int | None = None) -> Outcome:
    """Compile everything. `workers`: upper bound if other parts run in parallel; default one per core."""
    if place.rehearsal:
        return precompile(place, 90, place.cores, REHEARSED_S)
    return precompile(place, None, min(workers or WORKERS, place.cores))


def whole(place: Place, piece: str) -> Outcome:
    return judge_exit(place.run(["-m", "bench.gpu.whole", piece], {"FUSEDMOE_AUTOTUNE": "0", "TRITON_INTERPRET": "0"}))


def report(place: Place) -> Outcome:
    file = suites.keep(place)
    if file is None:
        return Outcome("failed", "nothing was measured")
    ended = place.run(["-m", "bench.report", str(file)])
    if ended.code == 0:
        file.with_suffix(".md").write_text(ended.output)
    outcome = judge_exit(ended)
    return outcome._replace(word=str(file)) if outcome.result == "passed" else outcome


def _tests(place: Place, count: int) -> Outcome:
    return checks.tests(place, 1 if place.rehearsal else min(count, place.cores))


def _configurations(place: Place, dtypes: Sequence[str], most: int) -> Outcome:
    return checks.configurations(place, min(most, place.cores), dtypes)


def _part(name: str, seconds: float, about: str, do: Callable[..., Outcome], *needs: str, **arguments: object) -> Part:
    return Part(name, seconds, partial(do, **arguments) if arguments else do, about, needs)


def _verify(seconds: float, most: int, *dtypes: str) -> Part:
    about = "configurations of the grouped products beside float64"
    return _part("configurations", seconds, about, _configurations, dtypes=dtypes, most=most)


_VERSIONS = _part("versions", _VERSIONS_S, "the GPU, its driver and the software", versions)
_REPORT = _part("report", 15, "tables and picture", report)


def _suite(name: str, seconds: float, *needs: str) -> Part:
    about = {"kernels": "every kernel against its limit", "passes": "the passes against theirs, beside other libraries"}
    return _part(name, seconds, f"{about[name]}, at nine shapes", suites.measure, *needs, suite=name)


def _sanitizers(seconds: float) -> Sequence[Part]:
    return [
        _part(tool, seconds, f"every kernel once under compute-sanitizer's {tool}", checks.sanitizer, tool=tool)
        for tool in ("memcheck", "racecheck")
    ]


def _compile(seconds: float, workers: int | None = None) -> Part:
    return _part("compile", seconds, "what all shapes launch, in parallel", compile_all, workers=workers)


PLANS = {
    "all": Plan(
        8.5,
        "correctness, then kernels and passes against their limits",
        [
            [_VERSIONS],
            [
                _part("tests", 150, "the kernels' tests", _tests, count=_BESIDE),
                _compile(150, _BESIDE),
                _verify(150, _BESIDE, "bfloat16"),
            ],
            [_suite("kernels", 105, "tests")],
            [_suite("passes", 140, "tests")],
            [_REPORT],
            _sanitizers(70),
        ],
    ),
    "1": Plan(
        8.5,
        "correctness",
        [
            [_VERSIONS],
            [_part("exercise", 100, "every kernel once beside float64", checks.exercise), _compile(100, 15)],
            [_part("tests", 230, "the kernels' tests", _tests, count=_TESTS)],
            [_verify(150, _TESTS, "bfloat16", "float16")],
        ],
    ),
    "2": Plan(
        5,
        "a whole layer and the main job",
        [
            [_VERSIONS],
            [
                _part("no wait", 90, "no host wait in a layer's step", whole, piece="waits"),
                _part("graph", 90, "the step captured and replayed", whole, piece="graph"),
                _part("torch.compile", 90, "the step compiled as one graph", whole, piece="compiled"),
            ],
            [
                _part(f"train {dtype}", 110, f"{training.STEPS} steps in {dtype}, beside a CPU's first", do)
                for dtype, do in (
                    ("fp32", partial(training.train, dtype="fp32")),
                    ("bf16", partial(training.train, dtype="bf16")),
                )
            ],
            [_part("resume", 75, "half of the steps, and a job that goes on", training.resume, "train fp32")],
        ],
    ),
    "3": Plan(
        8.5,
        "the benchmark, with other libraries that are installed",
        [[_VERSIONS], [_compile(90)], [_suite("kernels", 150)], [_suite("passes", 225)], [_REPORT]],
    ),
    "4": Plan(
        5,
        "sanitizers and profiles",
        [
            [_VERSIONS],
            [_part("exercise", 90, "every kernel once, which compiles them", checks.exercise)],
            _sanitizers(90),
            [_part("racecheck Gluon", 45, "an empty warp-specialised kernel, then Gluon's", checks.racecheck_gluon)],
            [_part("profile", 60, "kernels under Nsight Compute", checks.profile)],
        ],
    ),
}


def seconds(rounds: Rounds) -> float:
    return sum(max((part.seconds for part in together), default=0.0) for together in rounds)


def every_part() -> Plan:
    """Plan all parts of the steps once, each with its own time, for a rehearsal."""
    seen: set[str] = set()
    rounds = []
    for plan in (PLANS[step] for step in sorted(set(PLANS) - {"all"})):
        for together in plan.rounds:
            rounds.append([part for part in together if part.name not in seen])
            seen |= {part.name for part in together}
    rounds = [together for together in rounds if together]
    return Plan(seconds(rounds) / 60, "every part of the four steps", rounds)
