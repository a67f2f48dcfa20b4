"""`make chaos`: inject faults from a seed into working ranks; report outcomes as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.progress import ProgressBar
from tests.chaos.campaign import CLEAN_ERROR, FAILURES, OUTSIDE, RIGHT, Campaign, Result, Team, new_folder
from tests.chaos.command import parser_of, write_record
from tests.chaos.faults import FAULTS

ROOT = Path(__file__).parents[2]

DESCRIPTION = """\
Puts faults into small jobs of 2 and 4 ranks on this CPU, and looks at what becomes of them. A case is a job (training,
checkpoints, survival, profiling, planning, puts), a layout (EP, ESP, MP, chunks, blocks, 2DH, DDP, experts that move,
tuned schedules, the doors of functions and of Tutel), a fault (kill, stop, late, raise, no memory, wrong input,
other calls, another path, …), the rank at fault, and the call of a function at which it strikes.
All of it follows from the seed and the case's number.

A case ends right (every rank has the numbers of a world of one) or clean (by time-out + 10 s every living rank has
ended with an error that names a rank, an operation and a cure). Anything else is a failure: hang, wrong number, lost
checkpoint, bare error, leftover (threads, descriptors, memory, files). The command then ends with 1, and says how to
see that case again, by itself, with every rank's error.
"""

EXAMPLES = """\
examples:
  five minutes:            python -m tests.chaos --minutes 5
  one kind of fault:       python -m tests.chaos --only-faults kill stop --faults 200
  a failure again:         python -m tests.chaos --seed 7 --only 1234
  the record of the house: python -m tests.chaos --seed 1 --minutes 60 --json bench/results/chaos.json
"""


def main() -> int:
    parser = parser_of("tests.chaos", DESCRIPTION, EXAMPLES)
    parser.add_argument("--seed", type=int, help="what all cases follow from (default: a new one, which is printed)")
    parser.add_argument("--faults", type=int, metavar="N", help="end after so many cases (default: 1000)")
    parser.add_argument("--minutes", type=float, help="end after so many minutes, whichever comes first")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4], help="of a job (default: both)")
    parser.add_argument("--only-faults", nargs="+", metavar="NAME", default=[], choices=list(FAULTS), help="of these")
    parser.add_argument("--only", type=int, metavar="I", help="just this case of the seed, with every rank's error")
    parser.add_argument("--teams", type=int, default=2, help="cases at a time (default: 2; most of them wait)")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    campaign = Campaign(seed, tuple(given.ranks), tuple(given.only_faults))
    busy = os.getloadavg()[0]
    began = time.monotonic()
    if given.only is not None:
        return _again(campaign, given.only)
    count = given.faults or (10**6 if given.minutes else 1000)
    results = run(campaign, count, (given.minutes or 10**6) * 60, given.teams)
    seconds = time.monotonic() - began
    record = summary(results, seed, seconds) | {"idle": busy < 0.5, "teams": given.teams}
    show(record, results)
    damaged = 0
    if find_spec("tests.chaos.files") is not None and not given.only_faults:
        record["files"], damaged = damage_files(seed, len(results))
    write_record(record, given.json)
    return int(bool(record["failures"]) or bool(damaged))


def damage_files(seed: int, count: int) -> tuple[Any, int]:
    """Run the damaged-files campaign, which needs no ranks; return its record and exit code."""
    with new_folder() as folder:
        found = Path(folder, "files.json")
        command = [sys.executable, "-m", "tests.chaos.files", "--seed", str(seed), "--count", str(count)]
        done = subprocess.run([*command, "--json", str(found)], cwd=ROOT, stdout=subprocess.DEVNULL)
        record = json.loads(found.read_text()) if found.exists() else {}
    print(f"damaged files: {record.get('outcomes', 'no result')}")
    return record, done.returncode


def run(campaign: Campaign, count: int, seconds: float, teams: int = 2) -> list[Result]:
    """Run the first `count` cases within the time limit, in order of their numbers."""
    results: list[Result] = []
    errors: list[BaseException] = []
    deadline, lock, numbers = time.monotonic() + seconds, threading.Lock(), iter(range(count))

    def work(team: Team) -> None:
        try:
            while time.monotonic() < deadline and not errors:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                result = campaign.run(number, team)
                with lock:
                    results.append(result)
        except BaseException as error:  # reported below
            errors.append(error)

    began = time.monotonic()

    def total() -> int:
        rate = len(results) / max(1.0, time.monotonic() - began)
        return max(len(results), min(count, round(rate * seconds)))

    _with_teams(teams, work, lambda: (len(results), total()))
    if errors:
        raise errors[0]
    return sorted(results, key=lambda result: result.case.index)


def _with_teams(count: int, work: Callable[[Team], None], done: Callable[[], tuple[int, int]]) -> None:
    with new_folder() as folder, ProgressBar("faults") as bar:
        before, os.environ[CACHE] = os.environ.get(CACHE), folder
        # The store's thread resolves the name of each new connection and serves no rank meanwhile.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        teams = [Team(Path(folder, f"team-{number}"), store.port, number * 10**6) for number in range(count)]
        threads = [threading.Thread(target=work, args=(team,), daemon=True) for team in teams]
        try:
            teams[0].workers(1)  # from this thread: the fork server ends with the thread that starts it
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
                bar.show(*done())
        finally:
            for team in teams:
                team.close()
            if before is None:
                del os.environ[CACHE]
            else:
                os.environ[CACHE] = before


def _again(campaign: Campaign, number: int) -> int:
    found: list[Result] = []
    _with_teams(1, lambda team: found.append(campaign.run(number, team)), lambda: (len(found), 1))
    (result,) = found
    print(f"{result.case}\n\n{result.outcome}\n{result.text}\n")
    print("\n".join(result.more))
    return int(result.outcome in FAILURES)


def summary(results: list[Result], seed: int, seconds: float) -> dict[str, Any]:
    """Summarize the results in plain types."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    times: dict[str, list[float]] = defaultdict(list)
    named: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        fault = result.case.attack.fault
        counts[fault, result.case.place][result.outcome if result.fired else "not reached"] += 1
        if result.seconds is not None:
            times[fault].append(result.seconds)
        if result.named is not None:
            named[fault].append(result.named)
    return {
        "commit": _commit(),
        "machine": {
            "cpus": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "system": platform.release(),
        },
        "seed": seed,
        "cases": len(results),
        "seconds": round(seconds, 1),
        "cases_per_second": round(len(results) / seconds, 2),
        "outcomes": dict(Counter(result.outcome for result in results)),
        "counts": [{"fault": fault, "place": place} | dict(of) for (fault, place), of in sorted(counts.items())],
        "layouts": {
            layout: dict(Counter(r.outcome for r in results if f"{r.case.spec.kind}, {r.case.spec.layout}" == layout))
            for layout in sorted({f"{r.case.spec.kind}, {r.case.spec.layout}" for r in results})
        },
        "rank_at_fault_named": {fault: [sum(of), len(of)] for fault, of in sorted(named.items())},
        "not_named": [
            {"only": r.case.index, "case": str(r.case), "errors": [_without_places(text) for text in r.more]}
            for r in results
            if r.named is False
        ],
        "same_cause_on_all": [sum(bool(r.same) for r in results), sum(r.same is not None for r in results)],
        "seconds_to_error": {
            fault: {"median": round(statistics.median(of), 3), "max": round(max(of), 3)}
            for fault, of in sorted(times.items())
        },
        "failures": [
            {"seed": seed, "only": r.case.index, "outcome": r.outcome, "case": str(r.case)}
            | {"text": _without_places(r.text[-6000:])}
            for r in results
            if r.outcome in FAILURES
        ],
    }


def _without_places(text: str) -> str:
    """Replace the machine's paths in a traceback by relative ones."""
    return text.replace(f"{ROOT}/", "").replace(sys.base_prefix, "python")


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show(record: dict[str, Any], results: list[Result]) -> None:
    """Print the table, a line per fault, then every failure."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    table = Table(title=f"{record['cases']} faults of seed {record['seed']}, {record['cases_per_second']} a second")
    for name in ("fault", RIGHT, CLEAN_ERROR, OUTSIDE, *FAILURES, "not reached", "named", "median s", "max s"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for fault in FAULTS:
        of = Counter(r.outcome if r.fired else "not reached" for r in results if r.case.attack.fault == fault)
        if not of:
            continue
        named, told = record["rank_at_fault_named"].get(fault, (0, 0))
        times = record["seconds_to_error"].get(fault, {"median": "", "max": ""})
        cells = [of[name] or "" for name in (RIGHT, CLEAN_ERROR, OUTSIDE, *FAILURES, "not reached")]
        row = [fault, *cells, f"{named}/{told}" if told else "", times["median"], times["max"]]
        table.add_row(*map(str, row))
    console.print(table)
    for failure in record["failures"]:
        print(f"{failure['outcome']}: --seed {failure['seed']} --only {failure['only']}: {failure['case']}")


if __name__ == "__main__":
    sys.exit(main())
