"""`make bench-gpu`: correctness, then kernels and passes against their limits, one file of results, a report."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.checks import CHECKS, Check, checks
from bench.gpu.device import has_gpu
from bench.gpu.process import Ended, Process, run_together
from bench.gpu.results import RESULTS, document, save
from bench.gpu.shapes import SHAPES
from bench.gpu.spool import Spool

SUITES = {"kernels": "bench/bench_gpu_kernels.py", "passes": "bench/bench_gpu_passes.py"}
# Parts of the time: the checks get this much at the most, the kernels this much of the rest; what they leave goes on.
_CHECKS, _KERNELS = 0.42, 0.42
# For starting, for the ceilings at the end, for the report.
_ASIDE_S = 25.0
_TRIES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not has_gpu():
        print("bench-gpu measures a GPU, and PyTorch finds none here. make bench works without one.", file=sys.stderr)
        return 1
    return Run(60 * options.minutes).do(options.skip)


class Run:
    """One run in the time given. Says what it does, with the seconds since its start."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds

    @property
    def left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", flush=True)

    def do(self, skip: Sequence[str]) -> int:
        found = self.check({name: check for name, check in checks().items() if name not in skip})
        if any(check["result"] == "failed" for check in found):
            self.say("STOPPED: the kernels are wrong, so their speed means nothing. Nothing was written.")
            return 1
        with tempfile.TemporaryDirectory() as folder:
            spool_file, failed = Path(folder) / "spool", []
            for suite in SUITES:
                if suite not in skip:
                    last = suite == "passes" or "passes" in skip
                    seconds = (self.left - _ASIDE_S) * (1 if last else _KERNELS)
                    failed += [] if self.measure(suite, spool_file, seconds, max(60.0, seconds / 3)) else [suite]
            spool = Spool(spool_file)
        if not spool.of("row"):
            self.say("FAILED: nothing could be measured; see above.")
            return 1
        results = {**document(spool, found), "seconds": round(self._seconds - self.left)}
        path = save(results, RESULTS)
        self.report(results, path)
        if failed:
            self.say(f"FAILED in part: {', '.join(failed)}; see above. What was measured is in {path}")
        return 1 if failed else 0

    def check(self, wanted: dict[str, Check]) -> list[dict[str, Any]]:
        """Each check's name, result, word and seconds."""
        found: list[dict[str, Any]] = []

        def tell(name: str, result: str, word: str, seconds: float = 0.0, output: str = "") -> None:
            found.append({"name": name, "result": result, "word": word, "seconds": round(seconds, 1)})
            if result == "failed":
                print(output[-8000:], flush=True)
            self.say(f"{name}: {result.upper() if result == 'failed' else result} ({word})")
            if result == "failed" and name == "racecheck":
                print("  Known false alarm: lanes of a reduction that write the same place (Triton issue 7264).")
                print("  If it is one: make bench-gpu ARGS='--skip racecheck'")

        started = {name: check.start() for name, check in wanted.items()}
        processes = {name: process for name, process in started.items() if isinstance(process, Process)}
        for name, process in started.items():
            if isinstance(process, str):
                tell(name, "skipped", process)
        for name in CHECKS:
            if name not in wanted:
                tell(name, "skipped", "as asked for")
        self.say(f"correctness: {', '.join(processes)}, side by side")

        def judge(name: str, ended: Ended) -> None:
            result, word = wanted[name].judge(ended)
            tell(name, result, word, ended.seconds, ended.output)

        run_together(processes, _CHECKS * self._seconds, judge)
        return found

    def measure(self, suite: str, spool_file: Path, seconds: float, patience_s: float) -> bool:
        """Runs a suite, again where a process hung or died, without what hung. True if all of it went well.

        `patience_s`: what one piece of work, a peer's check or a shape's timing, may take.
        """
        deadline = time.monotonic() + seconds
        for _ in range(_TRIES):
            left = deadline - time.monotonic()
            if left < 20:
                self.say(f"{suite}: no time left")
                return False
            self.say(f"{suite}: {left:.0f} s for it")
            process = Process(_pytest(SUITES[suite], spool_file, left), show=True)
            ended = self._watch(process, spool_file, deadline, patience_s)
            if ended.code in (0, 1):
                return ended.code == 0
            missing = [shape.name for shape in SHAPES if not Spool(spool_file).is_done(suite, shape.name)]
            how = "was ended" if ended.code is None else f"died with {ended.code}"
            self.say(f"{suite}: its process {how}; not measured: {', '.join(missing) or 'nothing'}")
            if not missing:
                return True
        return False

    def _watch(self, process: Process, spool_file: Path, deadline: float, patience_s: float) -> Ended:
        """Waits for the process; ends it when the time is up, or one piece of work has taken too long."""
        started = time.time()
        while process.running:
            time.sleep(0.5)
            at_work = [work for work in Spool(spool_file).unfinished() if work["time"] >= started]
            if at_work and time.time() - at_work[-1]["time"] > patience_s:
                suite, shape, name = (at_work[-1][key] for key in ("suite", "shape", "name"))
                word = f"did not come back in {patience_s:.0f} s"
                self.say(f"{name} at {shape} {word}")
                Spool(spool_file).add("skipped", suite=suite, shape=shape, name=name, word=word)
                return process.ended(kill=True)
            if time.monotonic() > deadline + _ASIDE_S / 2:
                return process.ended(kill=True)
        return process.ended()

    def report(self, results: dict[str, Any], path: Path) -> None:
        from bench.report import picture, table

        print(table(results))
        self.say(f"results: {path}")
        try:
            self.say(f"picture: {picture(results, path.with_suffix('.png'))}")
        except ImportError as error:
            self.say(f"no picture: {error}")


def _pytest(file: str, spool_file: Path, seconds: float) -> list[str]:
    """Some of the seconds go into starting. pytest-timeout is off: the time is watched here."""
    quiet = ["-q", "-s", "--no-header", "-p", "no:cacheprovider", "--timeout", "0", "--benchmark-quiet"]
    spool = ["--spool", str(spool_file), "--seconds", str(seconds - 12)]
    return [sys.executable, "-m", "pytest", file, *quiet, *spool]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-gpu ARGS=…",
        description="Checks the kernels on this machine's GPU, then measures them and whole passes at eight shapes "
        "against the least time their FLOP and bytes take, beside other libraries that are installed. Writes "
        "bench/results/gpu_NAME_TIME.json and a picture beside it, and prints the report.",
        epilog="Nothing else should run on the GPU meanwhile. The largest shapes take about 60 GB of it, by estimate.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default 10); the parts share it")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="PART", choices=[*CHECKS, *SUITES], help=f"any of {[*CHECKS, *SUITES]}"
    )
    return parser
