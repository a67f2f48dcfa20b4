"""Compare schedules in simulation on published grids of layers, independent of the machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench.console import stdout_console
from bench.own_policy import add_policy_flags, check_own, register_own
from bench.simulate.grid import ABLATION, ASSUMPTIONS, LAYERS, PUBLISHED, SAMPLE, Result, run_grid, sample_costs
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.policies import POLICIES


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description="Compare schedules in simulation on published grids of layers.",
        epilog="policies:\n"
        + "\n".join(f"  {one.name:15}{one.description}" for one in POLICIES.values() if not one.is_user_defined),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--grid", choices=("fsmoe",), required=True, help="fsmoe: Table 5 of the FSMoE paper")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=f"layers per step (default: {LAYERS})")
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help="cases per testbed in which policies of whole models are simulated, too, at about one second per "
        f"case (default: {SAMPLE}, a fixed sample; at most 486)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_policy_flags(parser)
    parsed = parser.parse_args(arguments)
    if parsed.layers < 1:
        parser.error(f"--layers {parsed.layers}: a step has at least one layer")
    if parsed.sample < 1:
        parser.error(f"--sample {parsed.sample}: take at least one case")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse(arguments)
    try:
        own = None if settings.policy is None else register_own(settings.policy, settings.whole)
        if own is not None:
            for costs in sample_costs(settings.layers):
                check_own(own, costs)
        with ProgressBar("simulating") as bar:
            results = run_grid(settings.layers, settings.sample, bar.show, own)
    except ConfigError as error:
        print(f"bench.simulate: {error}", file=sys.stderr)
        sys.exit(2)
    assumptions = _assumptions(settings.layers, settings.sample)
    if settings.json:
        print(json.dumps(_as_dict(results, settings.layers, assumptions), indent=2))
    else:
        _print_table(results, settings.layers, assumptions)


def _name(result: Result) -> str:
    return "ideal" if result.contention == 1.0 else "calibrated"


def _assumptions(layers: int, sample: int) -> list[str]:
    every = {name: testbed.costs.contention.speed_fraction("intra", "inter") for name, testbed in TESTBEDS.items()}
    shares = ", ".join(f"{share:g} ({name})" for name, share in every.items())
    return [text.format(layers=layers, contention=shares, sample=sample) for text in ASSUMPTIONS]


def _as_dict(results: list[Result], layers: int, assumptions: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = {"grid": "fsmoe", "layers": layers}
    for result in results:
        data.setdefault(result.testbed, {})[_name(result)] = result.as_dict()
    for testbed, published in PUBLISHED.items():
        data[testbed]["published"] = published | {"layers": LAYERS}
    return data | {"assumptions": assumptions}


def _print_table(results: list[Result], layers: int, assumptions: list[str]) -> None:
    console = stdout_console()
    counts = results[0].as_dict()["cases"]
    sampled = f"n={counts['joint']}"
    speedups = Table(title="Mean speed-up over Tutel (with PipeMoE), 1,458 cases on each testbed")
    parts = Table(title=f"FlowMoE part by part, mean speed-up over Tutel, {sampled}")
    gaps = Table(title=f"Time of the joint policy over the bound, {sampled}")
    for table in (speedups, parts, gaps):
        table.add_column("testbed", no_wrap=True)
    for part in ABLATION:
        parts.add_column(part if part == ABLATION[0] else f"+ {part}", justify="right")
    columns, own = results[0].columns, results[0].own
    # Your policy in the cases of joint and the bound, too.
    both = own is not None and counts[own] > counts["joint"]
    for column in columns:
        few = f"\n{sampled}" * (counts[column] == counts["joint"] < max(counts.values()))
        speedups.add_column((column if column == own else column.replace("_", " ")) + few, justify="right")
    for column in [f"{own}\n{sampled}"] * both + ["differing\ndegrees"]:
        speedups.add_column(column, justify="right")
    for quantile in results[0].as_dict()["gap_to_bound"]:
        gaps.add_column(quantile, justify="right")
    for testbed, published in PUBLISHED.items():
        for result in (result for result in results if result.testbed == testbed):
            found, label = result.as_dict(), f"{testbed} {_name(result)}"
            cells = [f"{found[column]:.3f}" for column in columns]
            if both:
                cells.append(f"{found['sampled'][own]:.3f}")
            speedups.add_row(label, *cells, str(result.differing_degrees))
            parts.add_row(label, *(f"{share:.3f}" for share in found["ablation"].values()))
            gaps.add_row(label, *(f"{max(0.0, gap):.1%}" for gap in found["gap_to_bound"].values()))
        if layers == LAYERS:  # of the paper
            cells = [str(published.get(column, "")) for column in columns] + [""] * both
            speedups.add_row(f"{testbed} published", *cells, str(published.get("differing_degrees", "")))
        speedups.add_section()
    for table in (speedups, parts, gaps):
        for column in table.columns:
            column.overflow = "fold"  # terminals may be narrower than the headers
        console.print(table)
        if table is speedups and layers != LAYERS:
            console.print(f"published rows: only with --layers {LAYERS}", highlight=False)
        if table is speedups and own is not None:
            console.print(f"compare joint with {own} {sampled}; {own} is a candidate of joint", highlight=False)
    for text in assumptions:
        console.print(f"· {text}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
