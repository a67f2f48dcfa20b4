"""`python -m bench.placement.loads`: how skewed experts are, what copies of them would change, and what that takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.placement.baselines import (
    CLUSTER_A,
    Decision,
    Policy,
    auto,
    exact,
    expert_parallelism,
    hecate,
    replication,
    shadowing,
    swaps,
)
from bench.placement.made_loads import make_loads
from bench.placement.replay import Outcome, draw, replay
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.cli.settings import file_to_write, picture_to_write
from fusedmoe.errors import ConfigError
from fusedmoe.files import read_text
from fusedmoe.placement.placement import Nodes
from fusedmoe.runtime.progress import WorkBar

DESCRIPTION = """\
Follows the loads of experts, recorded or made up, under nine ways to place them, and shows what
each makes of the work of ranks and of what they receive from other nodes.

The rank with the most tokens sets the pace of a layer. With expert parallelism (ep) that is
whoever owns the most popular expert. hecate owns every expert once and, before each iteration,
copies those that the last 5 iterations asked for most: at most t experts travel (as many as the
time beside attention hides), a rank has room for m copies in each layer. Every 100 iterations
owners change as well. algorithm1 is hecate without the search that this library puts behind the
paper's Algorithm 1. exact is hecate, and once the gates have chosen it shares tokens over the
copies, and adds copies, as is cheapest; auto does so only where it saves 2% of a layer's time, and
may put copies in the place of useless ones; even does so until all ranks have the same, whatever it
costs. fastermoe, smartmoe and flexmoe are what others do; a rank has the same room for copies
there, and the last two the period that makes them fastest.

Columns of the table:
  straggler   work of the busiest rank over the mean; 1 is even. (×: how much less than ep)
  ingress     MB that the busiest rank receives from other nodes in one all-to-all of a layer
  layers      ms of all layers' all-to-alls and experts in an iteration, forward and backward
  waits       ms in which everything waits for experts on their way; what is hidden costs none
  faster      layers and waits together, against ep
  sent        MB of parameters, gradients and optimizer state that all ranks send, hidden or not
  copies      the most copies that a rank holds, of all layers together
  peak        MB of the rank whose experts take most, at that time: parameters, gradients and optimizer
              state, those of copies too, and what is there twice while owners change

Times are those of 4 nodes of V100s (Hecate's cluster A) and experts of GPT-MoE-S, in simulation.
"""

EXAMPLES = """\
examples:
  24 layers of 32 experts on 4 nodes of 4:
    python -m bench.placement.loads --png loads.png
  more room, less time to hide in:
    python -m bench.placement.loads -m 4 -t 4
  loads of a training run, as counts[iteration][layer][rank][expert]; --save writes such a file
    python -m bench.placement.loads --trace counts.json --ranks-per-node 8 --layer 3 --png layer3.png
  for a script:
    python -m bench.placement.loads --json | jq '.policies.hecate.straggler'
"""

POLICIES = ("ep", "fastermoe", "smartmoe", "flexmoe", "algorithm1", "hecate", "exact", "auto", "even")

#: Iterations between two changes that are tried for policies that do not say, or whose papers had other loads.
PERIODS = (5, 10, 25, 50, 100)


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement.loads",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_argument_group("loads")
    source.add_argument("--trace", type=Path, metavar="FILE", help="recorded loads; the other flags here make some up")
    for flag, default, what in (
        ("--iterations", 40, "iterations"),
        ("--layers", 24, "layers"),
        ("--experts", 32, "experts of a layer"),
        ("--ranks", 16, "ranks"),
        ("--tokens", 4096, "tokens that a rank routes in an iteration, each choice counted"),
        ("--seed", 0, "of the random numbers"),
    ):
        source.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    for flag, number, what in (
        ("--skew", 1.35, "of popularity: the k-th expert has k^-S of the first"),
        ("--drift", 0.05, "of the logarithm of a popularity, from one iteration to the next"),
        ("--jitter", 0.1, "of the same, of what comes and goes in one iteration"),
    ):
        source.add_argument(flag, type=float, default=number, metavar="S", help=f"{what} (default: {number:g})")
    placing = parser.add_argument_group("placement")
    placing.add_argument(
        "--ranks-per-node", type=int, default=4, metavar="N", help="consecutive ranks that share a node (default: 4)"
    )
    placing.add_argument(
        "-t", "--overlap", type=int, default=8, metavar="T", help="experts whose travel is hidden (default: 8)"
    )
    placing.add_argument(
        "-m", "--memory", type=int, default=2, metavar="M", help="copies a rank has room for, a layer (default: 2)"
    )
    placing.add_argument("--calibrate", action="store_true", help="hecate: look again after the gate")
    output = parser.add_argument_group("output")
    output.add_argument("--policy", choices=POLICIES, default="hecate", help="to show beside ep (default: hecate)")
    output.add_argument("--layer", type=int, default=0, metavar="N", help="to show (default: 0)")
    output.add_argument("--png", type=picture_to_write, metavar="FILE", help="that layer as .png, .svg or .pdf")
    output.add_argument("--save", type=file_to_write, metavar="FILE", help="write the loads, for --trace")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> int:
    """Simulates the policies and shows them; returns 2 where that cannot be, and says why."""
    try:
        _run(parse(flags))
    except ConfigError as error:
        print(f"bench.placement.loads: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    trace = _trace(arguments)
    if not 0 <= arguments.layer < trace.layers:
        raise ConfigError(f"--layer {arguments.layer}: the loads are of layers 0 to {trace.layers - 1}")
    if arguments.overlap < 0 or arguments.memory < 0:
        raise ConfigError(f"-t {arguments.overlap} and -m {arguments.memory} must be 0 or more")
    nodes = Nodes(trace.ranks, arguments.ranks_per_node)
    if arguments.save is not None:
        arguments.save.write_text(trace.to_json(), encoding="utf-8")
    best = _simulate(trace, nodes, arguments)
    outcomes = {name: outcome for name, (_, outcome) in best.items()}
    settings = {name: setting for name, (setting, _) in best.items()}
    if arguments.png is not None:
        title = f"Layer {arguments.layer}: ep before, {arguments.policy} after, {nodes} ranks ({trace.source})"
        before, after = outcomes["ep"], outcomes[arguments.policy]
        draw(trace, before, after, nodes, arguments.layer, arguments.png, title=title)
    if arguments.json:
        print(json.dumps(_as_dict(trace, nodes, outcomes, settings, arguments), indent=2))
    else:
        _print(trace, nodes, outcomes, settings, arguments)


def _trace(arguments: argparse.Namespace) -> LoadTrace:
    if arguments.trace is not None:
        try:
            return LoadTrace.from_json(read_text(Path(os.path.expanduser(arguments.trace))))
        except ConfigError as error:
            raise ConfigError(f"--trace {arguments.trace}: {error}; --save writes such a file") from error
    return make_loads(
        arguments.iterations,
        arguments.layers,
        arguments.ranks,
        arguments.experts,
        tokens=arguments.tokens,
        skew=arguments.skew,
        drift=arguments.drift,
        jitter=arguments.jitter,
        seed=arguments.seed,
    )


def _simulate(trace: LoadTrace, nodes: Nodes, arguments: argparse.Namespace) -> dict[str, tuple[str, Outcome]]:
    """Simulates each policy on the loads; returns the outcome of the fastest of its settings, and which that is."""
    t, m = arguments.overlap, arguments.memory

    def periods(policy: Callable[..., Decision], **more: int) -> dict[str, Policy]:
        return {f"every {every}": partial(policy, every=every, **more) for every in PERIODS}

    policies: tuple[dict[str, Policy], ...] = (
        {"": expert_parallelism},
        {"": partial(shadowing, m=m)},
        periods(swaps),
        periods(replication, m=m),
        {"": partial(hecate, t=t, m=m, calibrated=arguments.calibrate, searches=False)},
        {"": partial(hecate, t=t, m=m, calibrated=arguments.calibrate)},
        {"": partial(exact, t=t, m=m)},
        {"": partial(auto, t=t, m=m)},
        {"": partial(exact, t=t, m=m, level=1.0)},
    )
    best = {}
    for name, settings in zip(POLICIES, policies, strict=True):
        outcomes = []
        for setting, policy in settings.items():
            with WorkBar(f"simulating {name} {setting}") as bar:
                outcomes.append((setting, replay(trace, policy, nodes, CLUSTER_A, show=bar.show)))
        best[name] = min(outcomes, key=lambda one: one[1].iteration_s)
    return best


def _as_dict(
    trace: LoadTrace,
    nodes: Nodes,
    outcomes: dict[str, Outcome],
    settings: dict[str, str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The outcomes in plain types; times in seconds, sizes in bytes."""
    ep, layer = outcomes["ep"], arguments.layer
    return {
        "source": trace.source,
        "iterations": len(trace),
        "layers": trace.layers,
        "experts": trace.experts,
        "ranks": nodes.ranks,
        "ranks_per_node": nodes.per_node,
        "overlap": arguments.overlap,
        "memory": arguments.memory,
        "costs": vars(CLUSTER_A),
        "policies": {
            name: {
                "setting": settings[name],
                "straggler": one.straggler,
                "straggler_most": float(one.straggler_IL.max()),
                "ingress_bytes": one.ingress_bytes,
                "layers_s": one.layers_s,
                "waits_s": one.waits_s,
                "speedup": ep.iteration_s / one.iteration_s,
                "layer_speedups": one.speedup_L(ep).tolist(),
                "sent_bytes": float(one.sent_I.mean()),
                "replicas": int(one.replicas_I.max()),
                "owned": int(one.owned_I.max()),
                "peak_bytes": int(one.peak_I.max()),
            }
            for name, one in outcomes.items()
        },
        "layer": {
            "layer": layer,
            "policy": arguments.policy,
            "placement": str(outcomes[arguments.policy].last[layer]),
            "work_before": ep.work_ILW[-1, layer].tolist(),
            "work_after": outcomes[arguments.policy].work_ILW[-1, layer].tolist(),
        },
    }


def _print(
    trace: LoadTrace,
    nodes: Nodes,
    outcomes: dict[str, Outcome],
    settings: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    ep, after, layer = outcomes["ep"], outcomes[arguments.policy], arguments.layer
    console.print(trace.source or "loads from an unnamed source", markup=False, soft_wrap=True)
    console.print(
        f"{len(trace)} iterations, {trace.layers} layers of {trace.experts} experts on {nodes} ranks; "
        f"t = {arguments.overlap}, m = {arguments.memory}"
    )
    table = Table(title="In the mean of iterations, in simulation")
    table.add_column("policy")
    for column in ("straggler", "ingress MB", "layers ms", "waits ms", "faster", "sent MB", "copies", "peak MB"):
        table.add_column(column, justify="right")
    for name, one in outcomes.items():
        table.add_row(
            f"{name} {settings[name]}".rstrip(),
            f"{one.straggler:.2f} ({_ratio(ep.straggler, one.straggler)})",
            f"{one.ingress_bytes / 1e6:.2f} ({_ratio(ep.ingress_bytes, one.ingress_bytes)})",
            f"{one.layers_s * 1e3:.1f}",
            f"{one.waits_s * 1e3:.1f}",
            _ratio(ep.iteration_s, one.iteration_s),
            f"{one.sent_I.mean() / 1e6:.0f}",
            str(one.replicas_I.max()),
            f"{one.peak_I.max() / 1e6:.0f}",
        )
    console.print(table)
    console.print(_ranks(ep, after, nodes, layer, arguments.policy))
    shares_E = trace.load_ILE[-1, layer] / max(1, trace.load_ILE[-1, layer].sum())
    most = ", ".join(f"expert {expert} {shares_E[expert]:.0%}" for expert in np.argsort(-shares_E, kind="stable")[:5])
    console.print(f"most asked for then: {most}", soft_wrap=True)


def _ranks(before: Outcome, after: Outcome, nodes: Nodes, layer: int, policy: str) -> Table:
    """The last iteration of one layer, rank by rank."""
    table = Table(title=f"Layer {layer}, last iteration: {policy} (+: a copy)")
    table.add_column("rank", justify="right")
    table.add_column("tokens by ep", justify="right")
    table.add_column(f"by {policy}", justify="right")
    table.add_column("experts")
    lines = str(after.last[layer]).splitlines()
    for rank, line in enumerate(lines):
        work = (str(one.work_ILW[-1, layer, rank]) for one in (before, after))
        table.add_row(str(rank), *work, line.partition(":")[2].strip(), end_section=(rank + 1) % nodes.per_node == 0)
    return table


def _ratio(before: float, after: float) -> str:
    """Says how many times less; without end where nothing is left."""
    if before == after:
        return "1.0×"
    return f"{before / after:.1f}×" if after else "∞×"


if __name__ == "__main__":
    sys.exit(main())
