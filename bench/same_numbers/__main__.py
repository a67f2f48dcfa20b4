"""Command line of `bench.same_numbers`."""

from __future__ import annotations

import argparse
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __doc__ as description
from .launch import Version
from .runs import RUNS, Run
from .verdict import DIFFERENT, ROUNDING, SAME, compare

ROOT = Path(__file__).resolve().parents[2]
FAILED, SKIPPED = "FAILED", "skipped"


def outcome(run: Run, before: dict[str, Any], after: dict[str, Any]) -> tuple[str, str]:
    """Return the status of a run that both versions have executed, and a text."""
    errors = {name: one["error"] for name, one in (("before", before), ("after", after)) if "error" in one}
    if errors:
        return FAILED, "".join(f"\n{name}: {_end_of(error)}" for name, error in errors.items())
    if "skipped" in before or "skipped" in after:
        both = "skipped" in before and "skipped" in after
        return SKIPPED if both else FAILED, str(before.get("skipped", after.get("skipped")))
    verdict = compare(before["record"], after["record"], run.precision)
    times = (f"{one['seconds']:.1f} s ({one['cpu_s']:.1f} s of CPU)" for one in (before, after))
    text = f"{verdict.tensors} tensors, {' and '.join(times)}"
    if verdict.status != SAME:
        text += f"; {verdict.text}"
        if verdict.relative:
            text += f": relative {verdict.relative:.1e}, {verdict.ulps:.0f} ulps"
        elif verdict.status == ROUNDING:
            text += ": only signs of zeros, or bits of NaN"
    return verdict.status, text


def _end_of(error: str, lines: int = 12) -> str:
    return "\n    ".join(error.rstrip().splitlines()[-lines:])


def compare_trees(before: Path, after: Path, runs: Sequence[Run], folder: Path) -> dict[str, tuple[str, str]]:
    """Execute the runs with the library of two trees, print each outcome when both are done, and return them."""
    runs = sorted(runs, key=lambda run: (run.interpreted, run.world))
    programs = folder / "programs"
    shutil.copytree(Path(__file__).parent, programs / "same_numbers", ignore=shutil.ignore_patterns("__pycache__"))
    versions = [Version(name, tree, folder / name, programs) for name, tree in (("before", before), ("after", after))]
    done: queue.Queue[str | BaseException] = queue.Queue()

    def execute(version: Version) -> None:
        try:
            for name in version.execute(runs):
                done.put(name)
        except BaseException as error:
            done.put(error)

    for version in versions:
        threading.Thread(target=execute, args=(version,), daemon=True).start()
    outcomes: dict[str, tuple[str, str]] = {}
    named, counts = {run.name: run for run in runs}, Counter[str]()
    while len(outcomes) < len(runs):
        name = done.get()
        if isinstance(name, BaseException):
            raise name
        counts[name] += 1
        if counts[name] == len(versions):
            status, text = outcomes[name] = outcome(named[name], *(version.results.pop(name) for version in versions))
            print(f"[{len(outcomes):2}/{len(runs)}] {status:9} {name}: {text}", flush=True)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.same_numbers",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("against", nargs="?", metavar="COMMIT", help="version to compare the working tree with")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only runs whose names contain one of these"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    options = parser.parse_args(arguments)
    runs = [run for run in RUNS if any(text in run.name for text in options.only)]
    if options.list:
        print("\n".join(f"{run.name} ({run.world} rank{'s' * (run.world > 1)})" for run in runs))
        return 0
    if not options.against or not runs:
        parser.error("name a commit, as `make same-numbers AGAINST=main`, and runs that exist (--list)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the worktree
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name:
        folder = Path(name)
        before, after = folder / "before-tree", folder / "after-tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.against], check=True)
        try:
            # A copy, so that edits during the run do not mix versions.
            shutil.copytree(ROOT / "fusedmoe", after / "fusedmoe", ignore=shutil.ignore_patterns("__pycache__"))
            outcomes = compare_trees(before, after, runs, folder)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    counts = Counter(status for status, _ in outcomes.values())
    summary = ", ".join(f"{counts[status]} {status}" for status in (SAME, ROUNDING, DIFFERENT, FAILED, SKIPPED))
    print(f"{len(outcomes)} runs in {time.perf_counter() - began:.0f} s: {summary}")
    for status in (ROUNDING, DIFFERENT, FAILED):
        for name in (name for name, one in outcomes.items() if one[0] == status):
            print(f"{status}: {name}")
    return int(bool(counts[DIFFERENT] or counts[FAILED]))


if __name__ == "__main__":
    sys.exit(main())
