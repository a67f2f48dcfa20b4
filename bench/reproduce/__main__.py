"""`make reproduce`: compare the four papers' figures with this library's, with a reason for each difference.

Takes about ten minutes on two cores, without a GPU. Figures are computed from definitions, simulated with published
costs, or measured here. Parts that need root (two emulated nodes) are skipped with a message otherwise. The tables
"end-to-end" predict steps that other projects have published, from their model and machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Shown

from bench.gpu.process import ROOT
from bench.provenance import provenance
from bench.reproduce import flowmoe, fsmoe, hecate, lancet, published, testbed
from bench.reproduce.page import page
from bench.reproduce.table import HOW, PAPERS, Part, Table, cells
from fusedmoe.runtime.progress import ProgressBar

#: Results file, page, and measured code.
FILE = "reproduce.json"
PAGE = ROOT / "docs/reproduction.md"
MEASURED = ("fusedmoe/schedule", "fusedmoe/placement", "fusedmoe/training", "bench/reproduce", "bench/paper_degree.py")

#: All parts; the one that measures steps is last.
PARTS: tuple[Part, ...] = (
    *fsmoe.PARTS,
    *lancet.PARTS,
    *flowmoe.PARTS,
    *hecate.PARTS,
    *published.PARTS,
    *testbed.PARTS,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    file = options.results / FILE
    stored = json.loads(file.read_text()) if file.exists() else {"tables": {}}
    wanted = [part for part in PARTS if any(name in _names(part) for name in options.only)]
    if options.show:
        if not stored["tables"]:
            console.print(f"no results in {options.results}; run make reproduce first", highlight=False)
            return 0
        names = {head.name for part in wanted for head in part.heads}
        for name, one in stored["tables"].items():
            if name in names:
                _print(Table.from_dict(one), console)
    else:
        try:
            run(wanted, file, stored, console)
        except KeyboardInterrupt:
            console.print(f"interrupted; finished tables are in {file}", highlight=False)
            return 130
    options.page.write_text(page(json.loads(file.read_text())), encoding="utf-8")
    console.print(f"written: {file} and {options.page}", highlight=False)
    return 0


def run(wanted: Sequence[Part], file: Path, stored: Mapping[str, Any], console: Console) -> None:
    tables: dict[str, Any] = dict(stored["tables"])
    took_s = {one["part"]: one["seconds"] for one in tables.values()}
    begun = provenance(MEASURED)
    file.parent.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(wanted):
        later_s = sum(took_s.get(one.name, one.takes_s) for one in wanted[number + 1 :])
        label = f"{part.name} ({number + 1} of {len(wanted)}" + (f", {_minutes(later_s)} after it)" if later_s else ")")
        since = time.monotonic()
        with ProgressBar(label) as bar:
            found = part.run(bar.show)
        seconds = round(time.monotonic() - since, 1)
        for table in found:
            _print(table, console)
            tables[table.name] = table.as_dict() | {"part": part.name, "seconds": seconds, "run": begun}
        order = [head.name for one in PARTS for head in one.heads]
        kept = {name: tables[name] for name in order if name in tables}  # drops renamed tables
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"tables": kept}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(file)


def _print(table: Table, console: Console) -> None:
    console.print(f"\n{table.title}", style="bold", highlight=False, markup=False)
    console.print(f"{table.paper}, {table.source}; ours is {table.how}", highlight=False, markup=False)
    if table.skipped is not None:
        console.print(f"  {table.skipped}", highlight=False, markup=False)
        return
    shown = Shown()
    for column in ("", "paper", *table.columns, "why"):
        shown.add_column(column, justify="left" if column in ("", "why") else "right")
    for row in table.rows:
        shown.add_row(*map(escape, cells(row)))
    console.print(shown)
    for number, reason in enumerate(table.reasons, start=1):
        console.print(f"  {number}. {reason}", highlight=False, markup=False)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _names(part: Part) -> set[str]:
    return {"all", *(head.name for head in part.heads), *(head.paper.lower() for head in part.heads)}


def _parser() -> argparse.ArgumentParser:
    known = sorted({name for part in PARTS for name in _names(part)})
    parser = argparse.ArgumentParser(
        prog="make reproduce ARGS=…",
        description=__doc__,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=known,
        default=["all"],
        metavar="NAME",
        help="tables or papers (fsmoe, lancet, flowmoe, hecate, end-to-end) to run (default: all); others are kept",
    )
    parser.add_argument(
        "--show", action="store_true", help="print existing tables and write the page without running anything"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "bench/results",
        metavar="FOLDER",
        help="folder of reproduce.json (default: bench/results)",
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="Markdown page to generate from that file"
    )
    return parser


def _epilog() -> str:
    """List the tables by paper, with contents and duration, and how to read one."""
    lines = ["tables (about so many seconds on two cores):"]
    for paper in PAPERS:
        for part in PARTS:
            for head in part.heads:
                if head.paper == paper:
                    lines.append(f"  {head.name:24}{part.takes_s:4.0f} s  {head.source}: {head.title}")
    lines += ["", "columns:", "  paper        typed from the paper or report; – where it prints none"]
    lines += [f"  {how:13}{what.removeprefix(how).lstrip(': ')}" for how, what in HOW.items()]
    lines += [
        "  why          numbers of the reasons below a table; a table that needs more than there is here says so",
        "",
        "examples:",
        "  make reproduce",
        '  make reproduce ARGS="--only fsmoe-table5"',
        '  make reproduce ARGS="--only hecate lancet-greedy --results /tmp/try --page /tmp/try/page.md"',
        '  make reproduce ARGS="--show --only flowmoe"',
    ]
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # removes the two nodes if the run is ended
    sys.exit(main())
