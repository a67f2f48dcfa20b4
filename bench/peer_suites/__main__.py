"""Run other projects' tests with this library's experts enabled, and compare with the same tests without.

    python -m bench.peer_suites                                         # every suite whose test files are available
    python -m bench.peer_suites peft --minutes 10                       # the suites of a project, or a single one
    python -m bench.peer_suites --source transformers=../transformers   # test files of a checkout

Test files match the installed version and come from a checkout or from the source distribution, which is downloaded to
build/peer-suites. Suites that cannot run are skipped with a reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peer_suites.run import Result, run_suite
from bench.peer_suites.suites import SUITES


def main() -> None:
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m bench.peer_suites", description=description)
    parser.add_argument("only", nargs="*", help="projects or suites (default: all)")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit per run of a suite (default: 30)")
    parser.add_argument(
        "--source", action="append", default=[], metavar="PROJECT=FOLDER", help="use the test files of a checkout"
    )
    given = parser.parse_args()
    sources = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in given.source)}
    chosen = [suite for suite in SUITES if not given.only or {suite.name, suite.package} & set(given.only)]
    if not chosen:
        parser.error(f"no such suite: {', '.join(given.only)}")
    console, results = Console(), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, ended: int, collected: int) -> None:
            progress.update(task, description=what, completed=ended, total=collected or None)

        for suite in chosen:
            results.append(run_suite(suite, sources.get(suite.package), 60 * given.minutes, show))
    console.print(table(results))
    for line in notes(results):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def table(results: list[Result]) -> Table:
    """Return a row per suite: outcomes with this library, and number of differences."""
    made = Table("project", "version", "suite", "passed", "failed", "skipped", "differ")
    for result in results:
        counts = result.counts()
        numbers = [str(counts[outcome]) for outcome in ("passed", "failed", "skipped")]
        numbers.append(str(len(result.differences())))
        if not result.with_ours:
            numbers = [""] * len(numbers)
        made.add_row(result.suite.package, result.version, result.suite.name, *numbers)
    return made


def notes(results: list[Result]) -> list[str]:
    """Return a line per skipped or interrupted suite, and per test with different outcomes."""
    found = []
    for result in results:
        suite = f"{result.suite.package} {result.suite.name}"
        if result.reason:
            found.append(f"{suite}: {result.reason if result.with_ours else f'skipped, {result.reason}'}")
        found += [f"{suite}: {line}" for line in result.differences()]
    return found


if __name__ == "__main__":
    main()
