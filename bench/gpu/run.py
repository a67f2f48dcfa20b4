"""`make bench-gpu`: run the independent parts of a plan within its time, writing results as available."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bench.gpu.device import has_gpu
from bench.gpu.part import Log, Outcome, Part, Place, write_json
from bench.gpu.results import RESULTS
from bench.gpu.steps import PLANS, Plan, every_part, seconds
from bench.gpu.suites import rows_file

_REHEARSED = 3
_LISTEN_S = 0.5
# Results that do not require action.
_FINE = ("passed", "skipped", "alarm", "left out")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not options.rehearse and not has_gpu():
        print(
            "bench-gpu measures a GPU, and PyTorch finds none here. make bench works without one, and "
            "make bench-gpu ARGS=--rehearse tries everything but the GPU.",
            file=sys.stderr,
        )
        return 1
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    name = options.step or ("everything" if options.rehearse else "all")
    plan = PLANS[name] if name in PLANS else every_part()
    plan = plan if options.minutes is None else plan._replace(minutes=options.minutes)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or (Path(scratch) / "results" if options.rehearse else RESULTS)
        return Run(name, plan, out, Path(scratch), options.rehearse).do(options.skip)


class Run:
    """One run of a plan.

    Attributes:
        place: context of its parts.
    """

    def __init__(self, name: str, plan: Plan, out: Path, scratch: Path, rehearsal: bool = False) -> None:
        if rehearsal and out.resolve() == RESULTS.resolve():
            raise ValueError(f"no GPU is measured: what a rehearsal finds does not belong in {RESULTS}")
        out = out.resolve()  # processes have another working directory
        out.mkdir(parents=True, exist_ok=True)
        when = datetime.now(UTC)
        stem = out / f"{'rehearsal' if rehearsal else 'gpu'}-{name}_{when:%Y%m%dT%H%M%S}"
        log = Log(stem.with_name(f"{stem.name}.log"))
        self.place = Place(stem, scratch, log, os.cpu_count() or 1, rehearsal, _environment(scratch, rehearsal))
        # A rehearsal gets more time than the plan: its machine has fewer cores.
        self.plan = plan._replace(minutes=_REHEARSED * plan.minutes) if rehearsal else plan
        self._name, self._when = name, when
        self._took: dict[str, float] = {}

    def do(self, skip: Sequence[str] = ()) -> int:
        """Run the rounds in sequence; return 0 if nothing failed and nothing was left undone."""
        # Skipped parts leave their time to others.
        rounds = [[part for part in together if part.name not in skip] for together in self.plan.rounds]
        place, factor = self.place, 60 * self.plan.minutes / max(1.0, seconds(rounds))
        place.log.say(f"{self._name}: {self.plan.about}, {self.plan.minutes:g} minutes; all of it in {place.stem}.*")
        start, budget = time.monotonic(), 0.0
        for part in (part for together in self.plan.rounds for part in together if part.name in skip):
            place.done[part.name] = Outcome("left out", "as asked for")
        try:
            for together in rounds:
                budget += seconds([together])
                self._round(together, start + factor * budget)
        finally:
            self._write()
        place.log.say("")
        print(self._text())
        return 0 if all(found.result in _FINE for found in place.done.values()) else 1

    def _round(self, together: Sequence[Part], deadline: float) -> None:
        ready = []
        for part in together:
            blocked = [need for need in part.needs if self._result(need) == "failed"]
            if blocked:
                self._note(part, Outcome("not run", f"after {', '.join(blocked)} failed it would say nothing"), 0.0)
            else:
                ready.append(part)
        if not ready:
            return
        left = deadline - time.monotonic()
        self.place.log.say(f"{', '.join(part.name for part in ready)}: {left:.0f} s for it")
        with ThreadPoolExecutor(len(ready)) as threads:
            try:  # includes the start of the threads: the signal may arrive at any moment
                tasks = {threads.submit(self._do, part, deadline) for part in ready}
                while tasks:
                    # Bounded: a signal just before an unbounded wait would not interrupt it.
                    done, tasks = wait(tasks, _LISTEN_S, FIRST_COMPLETED)
                    for task in done:
                        self._note(*task.result())
            except BaseException:
                self.place.stop.set()  # ends all processes, and thereby the threads
                raise

    def _do(self, part: Part, deadline: float) -> tuple[Part, Outcome, float]:
        start = time.monotonic()
        try:
            outcome = part.do(self.place.of(part.name, deadline))
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        return part, outcome, time.monotonic() - start

    def _note(self, part: Part, outcome: Outcome, took: float) -> None:
        self.place.done[part.name], self._took[part.name] = outcome, took
        word = outcome.result if outcome.result in _FINE else outcome.result.upper()
        self.place.log.say(f"{part.name}: {word} ({outcome.word}), {took:.0f} s")
        if outcome.output:
            self.place.log.note(outcome.output, part.name)
            if outcome.result == "failed":
                print(outcome.output[-3000:], flush=True)
        self._write()

    def _result(self, name: str) -> str:
        return self.place.done[name].result if name in self.place.done else "not run"

    def _write(self) -> None:
        write_json(self.place.file(".json"), self.summary())
        self.place.file(".txt").write_text(self._text() + "\n")

    def summary(self) -> dict[str, Any]:
        """Return the parts that passed, failed (with output) and were not run."""
        return {
            "name": self._name,
            "when": self._when.isoformat(timespec="seconds"),
            "rehearsal": self.place.rehearsal,
            "minutes": self.plan.minutes,
            "seconds": round(self.place.log.seconds, 1),
            "parts": [self._told(part) for together in self.plan.rounds for part in together],
        }

    def _told(self, part: Part) -> Mapping[str, Any]:
        found = self.place.done.get(part.name, Outcome("not run", ""))
        return {
            "name": part.name,
            "about": part.about,
            "result": found.result,
            "word": found.word,
            "seconds": round(self._took.get(part.name, 0.0), 1),
            "budget_s": part.seconds,
            "output": found.output,
            "found": dict(found.found),
        }

    def _text(self) -> str:
        told = self.summary()
        lines = [f"{'rehearsal of ' * self.place.rehearsal}{self._name}, {told['when']}, {told['seconds']:.0f} s"]
        if self.place.rehearsal:
            lines.append("Nothing here was measured on a GPU; seconds are this machine's at tiny sizes.")
        lines += [f"{'part':18} {'budget':>7} {'took':>7}  result"]
        for part in told["parts"]:
            word = f"{part['result']}: {part['word']}" if part["word"] else part["result"]
            lines.append(f"{part['name']:18} {part['budget_s']:5.0f} s {part['seconds']:5.0f} s  {word}")
        compiled = self.place.done.get("compile", Outcome("", "")).found
        if compiled.get("measured"):
            lines.append(_compiling(compiled))
        lines.append(f"files: {self.place.stem}.json .txt .log; rows as they come: {rows_file(self.place)}")
        lines.append(f"tables: {self.place.stem.parent}/gpu_NAME_TIME.json .md .png")
        return "\n".join(lines)


def _compiling(found: Mapping[str, Any]) -> str:
    per_shape = ", ".join(f"{name} {count}" for name, count in found["by_shape"].items())
    return (
        f"compile: {found['kernels']} kernels ({per_shape}); {found['measured']} measured, {found['mean_s']} s each; "
        f"on {found['workers']} processes the first shape takes {found['first_shape_s']} s (on one "
        f"{found['first_shape_on_one_core_s']} s), all shapes {found['all_shapes_s']} s"
    )


def _environment(scratch: Path, rehearsal: bool) -> dict[str, str]:
    if not rehearsal:
        return {}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**hidden, "TRITON_CACHE_DIR": str(scratch / "triton"), "FUSEDMOE_CACHE": str(scratch / "cache")}


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _parser() -> argparse.ArgumentParser:
    names = list(dict.fromkeys(part.name for plan in PLANS.values() for together in plan.rounds for part in together))
    steps = [name for name in PLANS if name != "all"]
    told = "; ".join(f"{name}: {PLANS[name].about}, {PLANS[name].minutes:g} minutes" for name in steps)
    parser = argparse.ArgumentParser(
        prog="make bench-gpu ARGS=…",
        description="Check the kernels on this machine's GPU, then time kernels and whole passes at nine shapes "
        "against the minimum time of their FLOP and bytes, and against installed libraries. Everything is compiled "
        "in parallel first. A part that fails, hangs or dies is reported and does not affect others. Results, a "
        "summary (.json, .txt) and a log are written to --out while running.",
        epilog="Run nothing else on the GPU. The largest shapes use an estimated 60 GB of its memory. "
        f"Steps for a new GPU: {told}.",
    )
    parser.add_argument("--step", choices=steps, help="run a single step, see below")
    parser.add_argument("--minutes", type=float, help="total time, shared by all parts (default: 8.5, or the step's)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="results folder (default: bench/results)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="PART", choices=names, help=f"parts to skip, any of {names}"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every part (or a --step) without a GPU at tiny sizes, without meaningful times, and estimate "
        "the compile time; nothing is written to bench/results",
    )
    return parser
