"""The training job on a GPU: compare losses with a CPU, and a resumed job with an uninterrupted one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.part import Outcome, Place, judge_exit

STEPS = 40
# Tolerance of the first loss, which depends only on parameters and tokens, relative to the CPU in float32.
_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
# Tolerance of later losses relative to an uninterrupted job: summation orders may differ.
_RESUMED = 2e-3


def train(place: Place, dtype: str) -> Outcome:
    """Train all steps in this dtype, and one on the CPU."""
    ended = _job(place, dtype, "--dtype", dtype, "--steps", str(_steps(place)))
    if ended.result != "passed":
        return ended
    ours = losses(place.scratch / dtype)
    cpu = place.scratch / f"cpu-{dtype}"
    ended = _job(place, cpu.name, "--device", "cpu", "--steps", str(_steps(place)), "--stop-at", "1")
    if ended.result != "passed":
        return ended._replace(word=f"on the CPU: {ended.word}")
    return judge(ours, losses(cpu)[0], _TOLERANCE[dtype])


def resume(place: Place) -> Outcome:
    """Train half of the steps, resume for the rest, and compare with `train` in float32."""
    half = _steps(place) // 2
    ended = _job(place, "halves", "--steps", str(_steps(place)), "--stop-at", str(half))
    if ended.result != "passed":
        return ended
    command = ["-m", "fusedmoe", "train", "--resume", str(place.scratch / "halves")]
    ended = judge_exit(place.run(command, who="the other half"))
    if ended.result != "passed":
        return ended
    whole, halves = losses(place.scratch / "fp32"), losses(place.scratch / "halves")
    if len(halves) != len(whole):
        return Outcome("failed", f"{len(halves)} steps instead of {len(whole)}")
    worst = max(abs(a - b) / abs(a) for a, b in zip(whole, halves, strict=True))
    word = f"{half} and {len(whole) - half} steps, losses within {worst:.1e} of those of a whole job"
    return Outcome("passed" if worst <= _RESUMED else "failed", word, found={"losses": halves})


def judge(ours: Sequence[float], cpu: float, tolerance: float) -> Outcome:
    off = abs(ours[0] - cpu) / cpu
    word = f"{len(ours)} steps, loss {ours[0]:.4f} (on the CPU {cpu:.4f}) to {ours[-1]:.4f}"
    good = all(map(math.isfinite, ours)) and off <= tolerance and ours[-1] < ours[0]
    return Outcome("passed" if good else "failed", word, found={"losses": list(ours), "cpu": cpu})


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def _job(place: Place, name: str, *flags: str) -> Outcome:
    sizes = ["--layers", "1", "--model-dim", "32", "--batch", "2", "--seq-len", "32"] if place.rehearsal else []
    command = ["-m", "fusedmoe", "train", "--device", "cpu" if place.rehearsal else "cuda", *sizes]
    command += ["--eval-batches", "1", "--run-dir", str(place.scratch / name), *flags]
    return judge_exit(place.run(command, who=name))


def _steps(place: Place) -> int:
    return 6 if place.rehearsal else STEPS
