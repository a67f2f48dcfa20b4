"""`fusedmoe trace`: a training step as it ran, beside the step as it was planned."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, StopRequest, choose_device, choose_sizes, make_topology, process_group
from fusedmoe.cli.settings import (
    Settings,
    add_flags,
    add_parser,
    changes_of,
    describe,
    file_to_write,
    picture_to_write,
    read_costs,
)
from fusedmoe.cli.trainer import Trainer, compute_dtype, follows_plan, step_costs
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.schedule.draw import MAX_TIMELINES, draw
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import Timeline, align, save_trace

SUMMARY = "run a training step and show it beside its plan"

DESCRIPTION = """\
Runs training steps of a model by a schedule, on random text, and shows the middle one of them
beside what was predicted: a picture with a group of rows for each rank, a trace for
ui.perfetto.dev and chrome://tracing, and both times with their ratio.

A step here is the forward and the backward pass until all gradients are reduced, without the
optimizer. Predicted are matrix products and collectives, as measured by fusedmoe profile;
norms, softmax, gates, the order of rows and the loss are only in what is measured. So on a
small model the ratio is well above 1; where it is so on a large one, profile --again may help.

--schedule off runs without a plan, beside the prediction for the policy sequential.
"""

EXAMPLES = """\
examples:
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe.cli trace --ranks-per-node 2
  the same without overlap, to compare:
    torchrun … -m fusedmoe.cli trace --ranks-per-node 2 --schedule off --png off.png --json off.json
  two layers of a large model by another policy:
    torchrun … -m fusedmoe.cli trace --model Mixtral-7B --layers 2 --dtype bf16 --schedule fsmoe
"""

# All that a training job's step depends on.
_FLAGS = (
    *("--batch", "--seq-len", "--dtype", "--recompute", "--seed", "--objective", "--layers", "--model-dim", "--heads"),
    *("--kv-heads", "--norm", "--positions", "--bias", "--expert", "--activation", "--hidden", "--experts"),
    *("--experts-per-rank", "--moe-every", "--shared-hidden", "--gate", "--k", "--capacity-factor", "--order"),
    *("--ranks-per-node", "--ep", "--esp", "--mp", "--dispatch", "--wire-dtype", "--schedule", "--device", "--timeout"),
)

_WARM_UP = 2
_STEPS = 5


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trace` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "trace", SUMMARY, DESCRIPTION, EXAMPLES, run)
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help="measured steps, after two others (default: %(default)s)"
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="of fusedmoe profile --json, instead of measured now")
    for flag, kind, what in (("--png", picture_to_write, "the picture"), ("--json", file_to_write, "the trace")):
        name = f"trace.{flag[2:]}"
        group.add_argument(flag, type=kind, default=Path(name), metavar="FILE", help=f"{what} (default: {name})")
    add_flags(parser, _FLAGS, Settings(schedule="auto"))


def run(arguments: argparse.Namespace) -> int:
    """Runs the steps, writes both files and prints the comparison."""
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1")
    launch = Launch.from_environment()
    settings = Settings(schedule="auto").changed(changes_of(arguments))
    given = None if arguments.costs is None else read_costs(arguments.costs)
    sizes = choose_sizes(settings, launch)
    settings = settings.changed({"model": settings.model.with_experts(launch.ranks, sizes.ep)})
    device = choose_device(settings, launch)
    with process_group(launch, device, settings.timeout_s):
        topology = make_topology(sizes, settings.timeout_s)
        with topology.guard("fusedmoe trace"):
            costs = given or cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
            corpus = random_corpus(64 * settings.model.seq_len)
            trainer = Trainer(settings, topology, device, corpus, StopRequest())
            planned: tuple[Plan, StepCosts]
            if follows_plan(settings, sizes.ep, sizes.esp):
                planned = trainer.set_plan(costs)
            else:
                step = step_costs(settings, launch, sizes, costs)
                planned = POLICIES["sequential"].plan(step), step
            own = _run(trainer, arguments.steps)
            ranks = all_gather_object(topology.world, own, "gathering timelines")
    if launch.rank == 0:
        predicted = simulate(*planned)
        by_step = [align(timelines) for timelines in zip(*ranks, strict=True)]
        middle = sorted(by_step, key=_step_s)[len(by_step) // 2]
        title = f"{settings.model.name}, {launch.ranks} ranks, schedule {settings.schedule}"
        both = [predicted, *middle]
        draw(both[:MAX_TIMELINES], arguments.png, title=title)
        save_trace(both, arguments.json)
        print(describe(settings.model))
        print(f"{topology}, schedule {settings.schedule}")
        _show(predicted, middle, [_step_s(timelines) for timelines in by_step])
        print(f"{arguments.png}, {arguments.json}")
    return 0


def _run(trainer: Trainer, steps: int) -> list[Timeline]:
    """This rank's timelines of the steps, up to the optimizer."""
    found = []
    for number in range(_WARM_UP + steps):
        _, timeline = trainer.recorded_step(number)
        spans = tuple(span for span in timeline.spans if span.kind != "optimizer")
        found.append(Timeline(timeline.rank, spans, timeline.source, timeline.anchor_s))
    return found[_WARM_UP:]


def _step_s(timelines: Sequence[Timeline]) -> float:
    """From when the first rank begins to when the last one ends."""
    return max(one.end_s for one in timelines) - min(one.start_s for one in timelines)


def _show(predicted: Timeline, measured: Sequence[Timeline], steps_s: Sequence[float]) -> None:
    table = Table(title="seconds at work, ms", title_justify="left")
    for column in ("", "predicted", "measured (mean of ranks)"):
        table.add_column(column, justify="right" if column else "left")
    totals = [timeline.totals_s() for timeline in measured]
    expected = predicted.totals_s()
    for kind in dict.fromkeys([*expected, *(kind for total in totals for kind in total)]):
        mean_s = sum(total.get(kind, 0.0) for total in totals) / len(totals)
        table.add_row(kind, f"{1e3 * expected[kind]:.2f}" if kind in expected else "–", f"{1e3 * mean_s:.2f}")
    Console(highlight=False).print(table)
    step_s = _step_s(measured)
    several = f" (middle of {len(steps_s)}: {1e3 * min(steps_s):.1f} to {1e3 * max(steps_s):.1f})" * (len(steps_s) > 1)
    print(f"predicted {1e3 * predicted.end_s:.1f} ms, measured {1e3 * step_s:.1f} ms{several}")
    print(f"measured / predicted: {step_s / predicted.end_s:.2f}")
