"""`fusedmoe profile`: measure and cache the costs of links and matrix products."""

from __future__ import annotations

import argparse
import json
from itertools import permutations
from pathlib import Path

from rich.text import Text

from fusedmoe.cli.commands import MAX_BUDGET_S
from fusedmoe.cli.job import Launch, command_group, resolve_sizes
from fusedmoe.cli.settings import Settings, given_settings
from fusedmoe.cli.step_plans import format_scaled, make_console, make_table
from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import dump_with_digest
from fusedmoe.runtime.cache import PRODUCT_DTYPES, cached_profile
from fusedmoe.runtime.profiler import Profile

_RESOURCE_NAMES = {"compute": "matrix products", "intra": "links inside a node", "inter": "links between nodes"}


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.budget < MAX_BUDGET_S:
        raise ConfigError(f"--budget {arguments.budget:g}: must be more than 0 and less than {MAX_BUDGET_S:g} seconds")
    launch = Launch.from_environment()
    settings = Settings().changed(given_settings(arguments))
    sizes, settings = resolve_sizes(settings, launch)
    with command_group(settings, launch, sizes, "fusedmoe profile", arguments.duplex) as (topology, device):
        dtype = PRODUCT_DTYPES[arguments.products]
        measured, path = cached_profile(topology, device, dtype=dtype, budget_s=arguments.budget, again=arguments.again)
    if launch.rank == 0:
        _show(measured, path)
        if arguments.json is not None:
            arguments.json.write_text(dump_with_digest(json.loads(measured.to_json()), 1) + "\n", encoding="utf-8")
    return 0


def _show(measured: Profile, path: Path) -> None:
    console = make_console()
    columns = ("", "n up to", "points", "α", "1 / β", "r²")
    table = make_table("α + β·n", columns, right=columns[1:])
    for name, line in measured.costs.lines.items():
        points, unit = measured.points[name], "FLOP" if name == "gemm" else "B"
        r2 = "" if line.r2 is None else f"{line.r2:.4f}"
        most, rate = format_scaled(points[-1][0], unit), format_scaled(line.per_s, f"{unit}/s")
        table.add_row(Text(printable(name)), most, str(len(points)), _format_time(line.alpha_s), rate, r2)
    console.print(printable(measured.costs.machine), markup=False)
    console.print(table)
    of = measured.costs.contention
    shares = ((a, b, of.speed_fraction(a, b)) for a, b in permutations(_RESOURCE_NAMES, 2))
    if lost := ", ".join(
        f"{_RESOURCE_NAMES[a]} during {_RESOURCE_NAMES[b]} {share:.0%}" for a, b, share in shares if share < 1
    ):
        console.print(f"contention (fraction of speed kept): {lost}", highlight=False)
    kept = f"; cached in {path}" if path.exists() else ""
    console.print(printable(f"measured in {measured.seconds:.1f} s{kept}"), markup=False, soft_wrap=True)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
