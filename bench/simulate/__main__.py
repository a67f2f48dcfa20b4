"""Compares schedules in simulation on published grids of layers, without a machine to run them on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.simulate.grid import ABLATION, ASSUMPTIONS, COLUMNS, LAYERS, PUBLISHED, SAMPLE, Result, run_grid
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.policies import POLICIES


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description="Compares schedules in simulation on published grids of layers.",
        epilog="policies:\n"
        + "\n".join(f"  {one.name:15}{one.description}" for one in POLICIES.values() if not one.own),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--grid", choices=("fsmoe",), required=True, help="fsmoe: Table 5 of the FSMoE paper")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=f"of a step (default: {LAYERS})")
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help="cases of each testbed in which policies of whole models are simulated too, which takes about a "
        f"second a case (default: {SAMPLE}, drawn once; 486 are all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parsed = parser.parse_args(arguments)
    if parsed.layers < 1:
        parser.error(f"--layers {parsed.layers}: a step has at least one layer")
    if parsed.sample < 1:
        parser.error(f"--sample {parsed.sample}: take at least one case")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the grid and prints its table, or JSON."""
    settings = parse(arguments)
    with WorkBar("simulating") as bar:
        results = run_grid(settings.layers, settings.sample, bar.show)
    assumptions = _assumptions(settings.layers, settings.sample)
    if settings.json:
        print(json.dumps(_as_dict(results, settings.layers, assumptions), indent=2))
    else:
        _print_table(results, assumptions)


def _name(result: Result) -> str:
    return "ideal" if result.contention == 1.0 else "calibrated"


def _assumptions(layers: int, sample: int) -> list[str]:
    every = {name: testbed.costs.contention.share("intra", "inter") for name, testbed in TESTBEDS.items()}
    shares = ", ".join(f"{share:g} ({name})" for name, share in every.items())
    return [text.format(layers=layers, contention=shares, sample=sample) for text in ASSUMPTIONS]


def _as_dict(results: list[Result], layers: int, assumptions: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = {"grid": "fsmoe", "layers": layers}
    for result in results:
        data.setdefault(result.testbed, {})[_name(result)] = result.as_dict()
    for testbed, published in PUBLISHED.items():
        data[testbed]["published"] = published
    return data | {"assumptions": assumptions}


def _print_table(results: list[Result], assumptions: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    speedups = Table(title="Mean speed-up over Tutel (with PipeMoE), 1,458 cases on each testbed")
    parts = Table(title="FlowMoE part by part, mean speed-up over Tutel")
    gaps = Table(title="Time of the joint policy over the bound that no schedule beats")
    for table in (speedups, parts, gaps):
        table.add_column("testbed")
    for part in ABLATION:
        parts.add_column(part if part == ABLATION[0] else f"+ {part}", justify="right")
    for column in (*COLUMNS, "differing_degrees"):
        speedups.add_column(column.replace("_", " "), justify="right")
    for quantile in results[0].as_dict()["gap_to_bound"]:
        gaps.add_column(quantile, justify="right")
    for testbed, published in PUBLISHED.items():
        for result in (result for result in results if result.testbed == testbed):
            found, label = result.as_dict(), f"{testbed} {_name(result)}"
            cells = (f"{found[column]:.3f}" for column in COLUMNS)
            speedups.add_row(label, *cells, str(result.differing_degrees))
            parts.add_row(label, *(f"{share:.3f}" for share in found["ablation"].values()))
            gaps.add_row(label, *(f"{max(0.0, gap):.1%}" for gap in found["gap_to_bound"].values()))
        cells = (str(published.get(column, "")) for column in (*COLUMNS, "differing_degrees"))
        speedups.add_row(f"{testbed} published", *cells, end_section=True)
    for table in (speedups, parts, gaps):
        console.print(table)
    for text in assumptions:
        console.print(f"· {text}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
