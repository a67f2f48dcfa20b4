"""Measure what links and matrix products take.

Measures what schedules are made by: all-to-all between the ranks that hold experts,
all-gather and reduce-scatter between the shards of an expert, all-reduce between replicas,
and matrix products, each in many sizes, on all ranks at once. The time of each is a straight
line, α + β·n, with n in bytes or FLOP; contention is the share of their speed that products
and each kind of link keep while another of them works, too.

What is found is kept in $FUSEDMOE_CACHE, or else ~/.cache/fusedmoe, one file for each
machine, layout of ranks and dtype. Layers with schedule="auto" and fusedmoe train --schedule
find it there; without it they measure by themselves, once.
"""

from __future__ import annotations

import argparse
import json
from itertools import permutations
from pathlib import Path

from rich.text import Text

from fusedmoe.cli.job import Launch, ranks_of, settle
from fusedmoe.cli.settings import Commands, Settings, add_flags, add_parser, changes_of, file_to_write, picture_to_write
from fusedmoe.cli.step_plans import compute_dtype, make_console, make_table
from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import sealed
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.runtime.profiler import BUDGET_S as PROFILE_BUDGET_S
from fusedmoe.runtime.profiler import Profile

EXAMPLES = """\
examples:
  4 ranks of this machine as 2 nodes of 2, with a picture of points and lines:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe profile --ranks-per-node 2 --plot profile.png
  the same once more, for another network or a quieter machine, and as JSON for fusedmoe plan --costs:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe profile --ranks-per-node 2 --again --json costs.json
  the layout that a model gets, and products in 16 bits:
    torchrun --nnodes 4 --nproc-per-node 8 … -m fusedmoe profile --model Mixtral-7B --dtype bf16
  matrix products alone:
    fusedmoe profile --budget 5
"""

# Flags that a layout follows from, and the dtype of the products.
_FLAGS = (
    *("--dtype", "--heads", "--kv-heads", "--hidden", "--experts", "--experts-per-rank"),
    *("--ranks-per-node", "--ep", "--esp", "--mp", "--device", "--timeout"),
)

# What works on each resource, in words.
_WORKS = {"compute": "products", "intra": "links inside a node", "inter": "links between nodes"}

#: No budget is larger than this, in seconds.
MOST_S = 100.0


def add_command(commands: Commands) -> None:
    """Adds `profile` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "profile", __doc__, EXAMPLES, run)
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--budget",
        type=float,
        default=PROFILE_BUDGET_S,
        metavar="S",
        help=f"seconds that it may take, less than {MOST_S:g} (default: %(default)g)",
    )
    group.add_argument("--again", action="store_true", help="measure also where that was done before")
    group.add_argument("--plot", type=picture_to_write, metavar="FILE", help="points and lines as .png, .svg or .pdf")
    group.add_argument("--json", type=file_to_write, metavar="FILE", help="lines and points as JSON")
    add_flags(parser, _FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Measures, or reads what was measured before, and shows it; returns the exit code."""
    if not 0 < arguments.budget < MOST_S:
        raise ConfigError(f"--budget {arguments.budget:g}: give more than 0 and less than {MOST_S:g} seconds")
    launch = Launch.from_environment()
    settings = Settings().changed(changes_of(arguments))
    sizes, settings = settle(settings, launch)
    with ranks_of(settings, launch, sizes, "fusedmoe profile") as (topology, device):
        measured, path = cached_profile(
            topology, device, dtype=compute_dtype(settings), budget_s=arguments.budget, again=arguments.again
        )
    if launch.rank == 0:
        _show(measured, path)
        if arguments.json is not None:
            arguments.json.write_text(sealed(json.loads(measured.to_json()), 1) + "\n", encoding="utf-8")
        if arguments.plot is not None:
            plot(measured, arguments.plot)
    return 0


def _show(measured: Profile, path: Path) -> None:
    console = make_console()
    columns = ("", "n up to", "points", "α", "1 / β", "r²")
    table = make_table("α + β·n", columns, right=columns[1:])
    for name, line in measured.costs.lines.items():
        points, unit = measured.points[name], _unit(name)
        r2 = "" if line.r2 is None else f"{line.r2:.4f}"
        most, rate = _scaled(points[-1][0], unit), _scaled(line.per_s, f"{unit}/s")
        table.add_row(Text(printable(name)), most, str(len(points)), _time(line.alpha_s), rate, r2)
    console.print(printable(measured.costs.machine), markup=False)
    console.print(table)
    of = measured.costs.contention
    shares = ((a, b, of.share(a, b)) for a, b in permutations(_WORKS, 2))
    if lost := ", ".join(f"{_WORKS[a]} beside {_WORKS[b]} {share:.0%}" for a, b, share in shares if share < 1):
        console.print(f"contention, the speed that each keeps: {lost}", highlight=False)
    kept = f"; kept in {path}" if path.exists() else ""
    console.print(printable(f"measured in {measured.seconds:.1f} s{kept}"), markup=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _unit(name: str) -> str:
    return "FLOP" if name == "gemm" else "B"


def _scaled(value: float, unit: str) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def plot(measured: Profile, path: Path) -> None:
    """Draws the points of each line and the line through them, a panel each."""
    from matplotlib.figure import Figure

    lines = measured.costs.lines
    across, down = min(3, len(lines)), -(-len(lines) // 3)
    figure = Figure(figsize=(4.2 * across, 3.6 * down + 0.5), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel in panels[len(lines) :]:
        panel.set_axis_off()
    for (name, line), panel in zip(lines.items(), panels, strict=False):
        unit, size = ("GFLOP", 1e9) if name == "gemm" else ("MB", 1e6)
        n, seconds = zip(*measured.points[name], strict=True)
        ends = [0, n[-1]]
        panel.plot([end / size for end in ends], [1e3 * line.seconds(end) for end in ends], color="#0a2f66", zorder=1)
        panel.scatter([x / size for x in n], [1e3 * s for s in seconds], s=14, color="#ad380c", zorder=2)
        r2 = "" if line.r2 is None else f", r² {line.r2:.4f}"
        panel.set_title(f"{name}\n{_time(line.alpha_s)} + n / ({_scaled(line.per_s, _unit(name) + '/s')}){r2}", size=9)
        panel.set(xlabel=unit, ylabel="ms", xlim=(0, None), ylim=(0, None), axisbelow=True)
        panel.grid(color="#e4e4e4", linewidth=0.6)
    figure.suptitle(measured.costs.machine, fontsize=8)
    figure.savefig(path, dpi=130)
