"""Compile everything that the benchmark launches at all shapes in parallel, before anything is timed.

`python -m bench.gpu.precompile --target 90` prints a line per kernel, which serves as a heartbeat. The kernels are then
in Triton's cache.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.aot import layers
from bench.aot.compiling import Compiled, compile_all
from bench.aot.standin import Launch, recording
from bench.gpu.part import Outcome, Place, judge_exit, write_json
from bench.gpu.shapes import SHAPES, Shape

# Minimum number of workers for which a rehearsal estimates the duration.
WORKERS = 16


def precompile(place: Place, target: int | None, workers: int, seconds: float | None = None) -> Outcome:
    """Compile in separate processes. `target`: 90 for sm_90, None for the GPU's; `seconds`: time limit."""
    report = place.scratch / f"{place.who}.json"
    command = ["-m", "bench.gpu.precompile", "--workers", str(workers), "--report", str(report)]
    command += [] if target is None else ["--target", str(target)]
    command += [] if seconds is None else ["--seconds", str(seconds)]
    # Interpreted kernels cannot be compiled.
    ended = place.run(command, {"TRITON_INTERPRET": "0"}, silence_s=90.0)
    outcome = judge_exit(ended)
    return outcome._replace(found=json.loads(report.read_text()) if report.exists() else {})


def launches(target: int, shapes: Sequence[Shape] = SHAPES) -> dict[str, list[Launch]]:
    found: dict[str, list[Launch]] = {}
    seen: set[Launch] = set()
    for shape in shapes:
        with recording(target) as launched:
            layers.run(shape)
        found[shape.name] = [launch for launch in launched if launch not in seen]
        seen |= {*launched}
    return found


def makespan_s(seconds: Iterable[float], workers: int) -> float:
    """Return the time of `workers` workers that take the next task when idle."""
    ends = [0.0] * workers
    for task in seconds:
        heapq.heapreplace(ends, ends[0] + task)
    return max(ends)


def estimate(wanted: Mapping[str, Sequence[Launch]], done: Sequence[Compiled], workers: int) -> dict[str, Any]:
    """Estimate compile seconds on `workers` cores from measured kernels.

    Kernels that were not measured count as the mean of their name, or of all. `measured`: number of measured kernels,
    and `mean_s` their mean.
    """
    took = {one.launch: one.seconds for one in done if not one.error and not one.cached}
    if not took:
        return {"measured": 0}
    names: dict[str, list[float]] = {}
    for launch, seconds in took.items():
        names.setdefault(launch.kernel, []).append(seconds)
    every = statistics.mean(took.values())
    usual = {name: statistics.mean(taken) for name, taken in names.items()}

    def seconds_of(several: Iterable[Launch]) -> list[float]:
        return [took.get(launch, usual.get(launch.kernel, every)) for launch in several]

    first, *_ = wanted.values()
    everything = [launch for several in wanted.values() for launch in several]
    return {
        "measured": len(took),
        "mean_s": round(every, 2),
        "workers": workers,
        "first_shape_s": round(makespan_s(seconds_of(first), workers), 1),
        "first_shape_on_one_core_s": round(sum(seconds_of(first)), 1),
        "all_shapes_s": round(makespan_s(seconds_of(everything), workers), 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    wanted = launches(options.target or _target())
    kernels = [launch for several in wanted.values() for launch in several]
    counts = {name: len(several) for name, several in wanted.items()}
    found_s = time.monotonic() - start
    print(f"{len(kernels)} kernels, new at each shape: {counts}; {found_s:.1f} s to find them", flush=True)
    if options.seconds is not None:  # limited time covers some launches of each kernel
        kernels = _spread(kernels)
    done: list[Compiled] = []
    late, begin = False, time.monotonic()
    compiled = compile_all(kernels, options.workers)
    for one in compiled:
        done.append(one)
        how = one.error.splitlines()[-1][:300] if one.error else "was there" if one.cached else f"{one.seconds:.1f} s"
        print(f"{len(done)} of {len(kernels)}: {one.launch.kernel}: {how}", flush=True)
        if options.report is not None:
            found = estimate(wanted, done, max(options.workers, WORKERS))
            bad = [f"{one.launch}: {one.error}" for one in done if one.error]
            found |= {"kernels": len(kernels), "compiled": len(done), "by_shape": counts, "errors": bad}
            write_json(options.report, found)
        if options.seconds is not None and time.monotonic() - begin > options.seconds:
            late = True
            compiled.close()
            break
    bad = [one for one in done if one.error]
    names = ", ".join(sorted({one.launch.kernel for one in bad}))
    left = f", the others left out after {options.seconds:g} s" if late else ""
    print(
        f"{len(done) - len(bad)} of {len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s by "
        f"{options.workers} processes{left}" + (f"; {len(bad)} failed: {names}" if bad else "")
    )
    return 1 if bad else 0


def _spread(kernels: Sequence[Launch]) -> list[Launch]:
    place: dict[Launch, int] = {}
    counts: dict[str, int] = {}
    for launch in kernels:
        place[launch] = counts[launch.kernel] = counts.get(launch.kernel, 0) + 1
    return sorted(kernels, key=place.__getitem__)


def _target() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    # Such as 9.0: kernels are compiled for the reported capability.
    return 10 * major + minor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.precompile", description=__doc__)
    parser.add_argument("--target", type=int, help="90 for sm_90 (default: this machine's GPU)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="number of processes (default: one per core)"
    )
    parser.add_argument("--seconds", type=float, help="stop after this many seconds")
    parser.add_argument("--report", type=Path, help="JSON file, updated while running")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
