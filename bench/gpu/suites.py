"""Kernel and pass benchmarks in monitored processes; if one hangs or dies, another continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu.part import SILENCE_S, Outcome, Place, size
from bench.gpu.rehearsal import pretending, shapes_of
from bench.gpu.results import document, save
from bench.gpu.shapes import Shape
from bench.gpu.spool import Spool
from fusedmoe.files import cache_dir

SUITES = {"kernels": "bench/bench_gpu_kernels.py", "passes": "bench/bench_gpu_passes.py"}
# Minimum time to start a process, and reserve for start-up and the final ceilings.
_LEAST_S, _ASIDE_S = 20.0, 12.0
# Consecutive processes that start no work before giving up.
_IDLE = 2


def measure(place: Place, suite: str) -> Outcome:
    """Run a suite, restarting after hangs and crashes without the culprit; results are saved after every shape."""
    spool_file = rows_file(place)
    idle = 0
    while place.left > _LEAST_S and idle < _IDLE:
        begun = len(Spool(spool_file).records)
        command = ["-m", "pytest", SUITES[suite], *_OPTIONS, "--spool", str(spool_file)]
        command += ["--seconds", str(place.left - _ASIDE_S)]
        ended = place.run(command, pretending(place, suite), silence_s=SILENCE_S, sign=_keeper(place, spool_file))
        spool = Spool(spool_file)
        new = spool.records[begun:]
        if ended.code not in (0, 1):
            how = ended.why or f"ended with {ended.code}"
            place.log.say(f"{place.who}: a process was lost, {how}; what is left goes on in another")
        for work in [work for work in spool.unfinished() if work in new]:
            word = f"did not come back: {ended.why or f'its process ended with {ended.code}'}"
            place.log.say(f"{place.who}: {work['name']} at {work['shape']} {word}")
            spool.add("skipped", **{key: work[key] for key in ("suite", "shape", "name")}, word=word)
        keep(place)
        idle = 0 if any(record["event"] == "begin" for record in new) else idle + 1
        if not any(spool.is_open(suite, shape.name) for shape in shapes_of(place)):
            break
    return _judge(Spool(spool_file), suite, shapes_of(place))


def rows_file(place: Place) -> Path:
    """Return the file of incremental rows, which survives a kill and is continued."""
    return place.file(".rows.jsonl")


def keep(place: Place) -> Path | None:
    """Save the results so far under the run's start time; None if there are none."""
    spool = Spool(rows_file(place))
    if not spool.of("row") or not spool.of("ceilings"):
        return None
    if not place.rehearsal:
        # Preserve the tuner's configuration times, which would be lost with the machine.
        for file in cache_dir().glob("grouped-*.json"):
            shutil.copy(file, place.stem.parent)
    checks = [{"name": name, "result": found.result, "word": found.word} for name, found in place.done.items()]
    found = document(spool, checks, shapes_of(place))
    return save(found | ({"rehearsal": True} if place.rehearsal else {}), place.stem.parent)


def _keeper(place: Place, spool_file: Path) -> Callable[[], int]:
    """Return a function that returns the spool's size (a sign of life) and saves results after each shape."""
    seen, kept = -1, len(Spool(spool_file).of("done"))

    def sign() -> int:
        nonlocal seen, kept
        if (now := size(spool_file)) != seen:
            seen = now
            if (done := len(Spool(spool_file).of("done"))) > kept:
                kept = done
                keep(place)
        return seen

    return sign


def _judge(spool: Spool, suite: str, shapes: Sequence[Shape]) -> Outcome:
    done = [shape.name for shape in shapes if spool.is_done(suite, shape.name)]
    failed = {record["shape"]: record["word"] for record in spool.of("failed") if record["suite"] == suite}
    failed |= {shape.name: "its process ended twice" for shape in shapes if spool.stops(suite, shape.name) > 1}
    wrong = [f"{record['name']} at {record['shape']}" for record in spool.of("wrong") if record["suite"] == suite]
    missing = [shape.name for shape in shapes if shape.name not in done and shape.name not in failed]
    words = [f"{len(done)} of {len(shapes)} shapes"]
    words += [f"failed: {', '.join(failed)}"] * bool(failed) + [f"wrong: {', '.join(wrong)}"] * bool(wrong)
    words += [f"not measured: {', '.join(missing)}"] * bool(missing)
    result = "failed" if failed or wrong else "unfinished" if missing else "passed"
    return Outcome(result, "; ".join(words), json.dumps(failed, indent=1) if failed else "")


# pytest-timeout is off: the timeout is enforced here.
_OPTIONS = ("-q", "-s", "--no-header", "-p", "no:cacheprovider", "--timeout", "0", "--benchmark-quiet")
