"""`python -m bench.placement.loads`: skew of expert loads, and benefit and cost of replicas under each policy."""

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

from bench.own_policy import import_function
from bench.placement.baselines import (
    CLUSTER_A,
    Decision,
    Policy,
    auto,
    by_layer,
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
from fusedmoe.cli.settings import parse_figure_path, parse_output_path
from fusedmoe.errors import ConfigError
from fusedmoe.files import read_text
from fusedmoe.placement.placement import NodeLayout
from fusedmoe.runtime.progress import ProgressBar

DESCRIPTION = """\
Replay expert loads, recorded or synthetic, under nine placement policies, and your own, and compare
the ranks' work and inter-node traffic.

The busiest rank determines the time of a layer. With expert parallelism (ep) it is the owner of
the most popular expert. hecate has one owner per expert and, before each iteration, replicates the
most popular experts of the last 5 iterations: at most t experts are sent (the number that attention
hides), with memory for m replicas per rank and layer. Every 100 iterations owners change as well.
algorithm1 is hecate without this library's search after the paper's Algorithm 1. exact is hecate
and, after the gate, distributes tokens over replicas and adds replicas at minimum cost; auto does
so only if it saves 2% of a layer's time, and may replace underused replicas; even does so until all
ranks have equal work, at any cost. fastermoe, smartmoe and flexmoe are other systems, with the same
memory for replicas; the last two use their fastest period.

Columns of the table:
  straggler   work of the busiest rank / mean; 1 is even (×: reduction relative to ep)
  ingress     MB received from other nodes by the busiest rank in one all-to-all of a layer
  layers      ms per iteration of all layers' all-to-alls and experts, forward and backward
  waits       ms per iteration of exposed expert transfers
  faster      speed-up of layers plus waits over ep
  sent        MB of parameters, gradients and optimizer state sent by all ranks, hidden or not
  copies      maximum replicas per rank, over all layers together
  peak        maximum MB of a rank's experts: parameters, gradients and optimizer state, including
              replicas and duplicates while owners change

Simulated for 4 nodes of V100s (Hecate's cluster A) and the experts of GPT-MoE-S.
"""

EXAMPLES = """\
examples:
  24 layers of 32 experts on 4 nodes of 4:
    python -m bench.placement.loads --png loads.png
  more memory, less overlap:
    python -m bench.placement.loads -m 4 -t 4
  loads of a training run, as counts[iteration][layer][rank][expert]; --save writes such a file
    python -m bench.placement.loads --trace counts.json --ranks-per-node 8 --layer 3 --png layer3.png
  your own policy, a function LayerLoads -> Placement, of which t experts per layer are hidden:
    python -m bench.placement.loads --policy my_policies:copy_the_busiest
  for a script:
    python -m bench.placement.loads --json | jq '.policies.hecate.straggler'
"""

POLICIES = ("ep", "fastermoe", "smartmoe", "flexmoe", "algorithm1", "hecate", "exact", "auto", "even")

#: Periods tried for policies without a stated period, or whose papers had other loads.
PERIODS = (5, 10, 25, 50, 100)


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement.loads",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_argument_group("loads")
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="recorded loads; otherwise synthetic loads from the flags below"
    )
    for flag, default, what in (
        ("--iterations", 40, "iterations"),
        ("--layers", 24, "layers"),
        ("--experts", 32, "experts per layer"),
        ("--ranks", 16, "ranks"),
        ("--tokens", 4096, "expert choices per rank and iteration"),
        ("--seed", 0, "random seed"),
    ):
        source.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    for flag, number, what in (
        ("--skew", 1.35, "skew: the k-th most popular expert has k^-S of the first one's load"),
        ("--drift", 0.05, "standard deviation of log popularity's step per iteration"),
        ("--jitter", 0.1, "standard deviation of log popularity's independent noise"),
    ):
        source.add_argument(flag, type=float, default=number, metavar="S", help=f"{what} (default: {number:g})")
    placing = parser.add_argument_group("placement")
    placing.add_argument(
        "--ranks-per-node", type=int, default=4, metavar="N", help="consecutive ranks per node (default: 4)"
    )
    placing.add_argument(
        "-t",
        "--overlap",
        type=int,
        default=8,
        metavar="T",
        help="experts per layer whose transfer is hidden (default: 8)",
    )
    placing.add_argument(
        "-m", "--memory", type=int, default=2, metavar="M", help="memory for replicas per rank and layer (default: 2)"
    )
    placing.add_argument("--calibrate", action="store_true", help="hecate: re-plan after the gate")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--policy",
        type=_parse_policy,
        default="hecate",
        metavar="NAME",
        help=f"policy to show next to ep (default: hecate): {', '.join(POLICIES)}, or your own, MODULE:FUNCTION",
    )
    output.add_argument("--layer", type=int, default=0, metavar="N", help="layer to show (default: 0)")
    output.add_argument("--png", type=parse_figure_path, metavar="FILE", help="plot of that layer, .png, .svg or .pdf")
    output.add_argument("--save", type=parse_output_path, metavar="FILE", help="write the loads to a file for --trace")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(flags)


def _parse_policy(name: str) -> str:
    if ":" in name or name in POLICIES:
        return name
    raise argparse.ArgumentTypeError(f"no policy {name!r}; choose from {', '.join(POLICIES)}, or give MODULE:FUNCTION")


def main(flags: Sequence[str] | None = None) -> int:
    """Simulate the policies and print the results; return 2 with a message if impossible."""
    try:
        _run(parse(flags))
    except ConfigError as error:
        print(f"bench.placement.loads: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    own = _own_policy(arguments)
    trace = _trace(arguments)
    if not 0 <= arguments.layer < trace.layers:
        raise ConfigError(f"--layer {arguments.layer}: the loads are of layers 0 to {trace.layers - 1}")
    if arguments.overlap < 0 or arguments.memory < 0:
        raise ConfigError(f"-t {arguments.overlap} and -m {arguments.memory} must be 0 or more")
    node_layout = NodeLayout(trace.ranks, arguments.ranks_per_node)
    if arguments.save is not None:
        arguments.save.write_text(trace.to_json(), encoding="utf-8")
    best = _simulate(trace, node_layout, arguments, own)
    outcomes = {name: outcome for name, (_, outcome) in best.items()}
    settings = {name: setting for name, (setting, _) in best.items()}
    if arguments.png is not None:
        title = f"Layer {arguments.layer}: ep before, {arguments.policy} after, {node_layout} ranks ({trace.source})"
        before, after = outcomes["ep"], outcomes[arguments.policy]
        draw(trace, before, after, node_layout, arguments.layer, arguments.png, title=title)
    if arguments.json:
        print(json.dumps(_as_dict(trace, node_layout, outcomes, settings, arguments), indent=2))
    else:
        _print(trace, node_layout, outcomes, settings, arguments)


def _own_policy(arguments: argparse.Namespace) -> dict[str, dict[str, Policy]]:
    """Import your own policy and name it as its function; empty: a policy of POLICIES is shown."""
    if ":" not in arguments.policy:
        return {}
    function = import_function(arguments.policy, "my_policies:copy_the_busiest")
    arguments.policy = arguments.policy.partition(":")[2]
    if arguments.policy in POLICIES or not callable(function):
        raise ConfigError(
            f"--policy: {arguments.policy} must be a function with another name than {', '.join(POLICIES)}"
        )
    return {arguments.policy: {"": by_layer(function, t=arguments.overlap)}}


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


def _simulate(
    trace: LoadTrace, node_layout: NodeLayout, arguments: argparse.Namespace, own: dict[str, dict[str, Policy]]
) -> dict[str, tuple[str, Outcome]]:
    """Return each policy's outcome with its fastest setting, and that setting."""
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
    for name, settings in (dict(zip(POLICIES, policies, strict=True)) | own).items():
        outcomes = []
        for setting, policy in settings.items():
            with ProgressBar(f"simulating {name} {setting}") as bar:
                outcomes.append((setting, replay(trace, policy, node_layout, CLUSTER_A, show=bar.show)))
        best[name] = min(outcomes, key=lambda one: one[1].iteration_s)
    return best


def _as_dict(
    trace: LoadTrace,
    node_layout: NodeLayout,
    outcomes: dict[str, Outcome],
    settings: dict[str, str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the outcomes as JSON; times in seconds, sizes in bytes."""
    ep, layer = outcomes["ep"], arguments.layer
    return {
        "source": trace.source,
        "iterations": len(trace),
        "layers": trace.layers,
        "experts": trace.experts,
        "ranks": node_layout.num_ranks,
        "ranks_per_node": node_layout.per_node,
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
    node_layout: NodeLayout,
    outcomes: dict[str, Outcome],
    settings: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    ep, after, layer = outcomes["ep"], outcomes[arguments.policy], arguments.layer
    console.print(trace.source or "loads from an unnamed source", markup=False, soft_wrap=True)
    console.print(
        f"{len(trace)} iterations, {trace.layers} layers of {trace.experts} experts on {node_layout} ranks; "
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
    console.print(_ranks(ep, after, node_layout, layer, arguments.policy))
    shares_E = trace.load_ILE[-1, layer] / max(1, trace.load_ILE[-1, layer].sum())
    most = ", ".join(f"expert {expert} {shares_E[expert]:.0%}" for expert in np.argsort(-shares_E, kind="stable")[:5])
    console.print(f"most asked for then: {most}", soft_wrap=True)


def _ranks(before: Outcome, after: Outcome, node_layout: NodeLayout, layer: int, policy: str) -> Table:
    table = Table(title=f"Layer {layer}, last iteration: {policy} (+: a copy)")
    table.add_column("rank", justify="right")
    table.add_column("tokens by ep", justify="right")
    table.add_column(f"by {policy}", justify="right")
    table.add_column("experts")
    lines = str(after.last[layer]).splitlines()
    for rank, line in enumerate(lines):
        work = (str(one.work_ILW[-1, layer, rank]) for one in (before, after))
        table.add_row(
            str(rank), *work, line.partition(":")[2].strip(), end_section=(rank + 1) % node_layout.per_node == 0
        )
    return table


def _ratio(before: float, after: float) -> str:
    if before == after:
        return "1.0×"
    return f"{before / after:.1f}×" if after else "∞×"


if __name__ == "__main__":
    sys.exit(main())
