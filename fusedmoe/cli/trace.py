"""Run a training step and show it beside its plan.

Runs training steps of a model by a schedule, on random text, and shows the middle one of them
beside what was predicted: a picture with a group of rows for each rank, a trace for
ui.perfetto.dev and chrome://tracing, and both times with their ratio.

Predicted is what the parts of the model's own steps take, which is measured first and kept. With
--costs it is matrix products and collectives alone: a step then ends when its gradients are
reduced, and norms, gates, the order of rows and the loss are only in what is measured.

A part of a step begins when the last rank begins it and ends when the last one has ended it, so
that waiting for a late rank counts once. "count-exchange" is the ranks telling each other how many
rows they will send; "other" is all else that a pass takes beside its tasks: gate, order, norms,
embedding.

--schedule off runs without a plan, beside the prediction by costs for the policy sequential.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, StopRequest, in_words, ranks_of, settle
from fusedmoe.cli.settings import (
    STEP_FLAGS,
    Commands,
    Settings,
    add_flags,
    add_parser,
    changes_of,
    describe,
    file_to_write,
    picture_to_write,
    read_costs,
)
from fusedmoe.cli.step_plans import compute_dtype, follows_plan, policy_followed, step_costs, table_of
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm import all_gather_object
from fusedmoe.errors import ConfigError, printable
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.schedule import POLICIES, Plan, StepCosts, Timeline, draw, makespan, observe, refit, simulate
from fusedmoe.schedule.draw import MAX_TIMELINES
from fusedmoe.schedule.machines import spread_of
from fusedmoe.schedule.refit import Row, compare
from fusedmoe.schedule.task import TaskKind
from fusedmoe.schedule.timeline import align, save_trace

EXAMPLES = """\
examples:
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe trace --ranks-per-node 2
  the same without overlap, to compare:
    torchrun … -m fusedmoe trace --ranks-per-node 2 --schedule off --png off.png --json off.json
  two layers of a large model by another policy:
    torchrun … -m fusedmoe trace --model Mixtral-7B --layers 2 --dtype bf16 --schedule fsmoe
"""

_WARM_UP = 2
_STEPS = 5


def add_command(commands: Commands) -> None:
    """Adds `trace` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "trace", __doc__, EXAMPLES, run)
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help="measured steps, after two others (default: %(default)s)"
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="of fusedmoe profile --json, instead of measured now")
    for flag, kind, what in (("--png", picture_to_write, "the picture"), ("--json", file_to_write, "the trace")):
        name = f"trace.{flag[2:]}"
        group.add_argument(flag, type=kind, default=Path(name), metavar="FILE", help=f"{what} (default: {name})")
    add_flags(parser, (*STEP_FLAGS, "--seed"), Settings(schedule="auto"))


def run(arguments: argparse.Namespace) -> int:
    """Runs the steps, writes both files and prints the comparison."""
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1")
    launch = Launch.from_environment()
    settings = Settings(schedule="auto").changed(changes_of(arguments))
    given = None if arguments.costs is None else read_costs(arguments.costs)
    sizes, settings = settle(settings, launch)
    policy_followed(settings, sizes)  # refuses before the machine is measured
    with ranks_of(settings, launch, sizes, "fusedmoe trace") as (topology, device):
        # Given costs are of this machine as somebody measured it; else it is measured now, once.
        costs = given or cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
        corpus = random_corpus(64 * settings.model.seq_len)
        trainer = Trainer(settings, topology, device, corpus, StopRequest())
        planned: tuple[Plan, StepCosts]
        if follows_plan(settings, sizes.ep, sizes.esp):
            planned = trainer.set_plan(costs if given else trainer.measured(costs))
        else:
            step = step_costs(settings, launch, sizes, costs)
            planned = POLICIES["sequential"].plan(step), step
        numbers = range(_WARM_UP + arguments.steps)
        own = [trainer.recorded_step(number)[1] for number in numbers][_WARM_UP:]
        ranks = all_gather_object(topology.world, own, "gathering timelines")
    if launch.rank == 0:
        # Ranks are the outer list; a step is to be compared over its ranks.
        by_step = [list(timelines) for timelines in zip(*ranks, strict=True)]
        # The costs know nothing of the optimizer: leave it out of what is compared.
        if planned[1].optimizer_s is None:
            by_step = [[_without_optimizer(timeline) for timeline in timelines] for timelines in by_step]
        # The median step: the first ones warm up caches, and any may be disturbed.
        middle = sorted(by_step, key=_step_s)[len(by_step) // 2]
        title = f"{settings.model.name}, {in_words(launch.ranks)}, schedule {settings.schedule}"
        both = [simulate(*planned), *align(middle)]
        draw(both[:MAX_TIMELINES], arguments.png, title=title)
        save_trace(both, arguments.json)
        print(describe(settings.model))
        print(printable(f"{topology}, schedule {settings.schedule}"))
        plan, costs_then = planned
        again_s = makespan(plan, refit(costs_then, observe(plan, costs_then, by_step)))
        _show(compare(*planned, middle), again_s, middle, [_step_s(timelines) for timelines in by_step])
        print(printable(f"{arguments.png}, {arguments.json}"))
    return 0


def _without_optimizer(timeline: Timeline) -> Timeline:
    return replace(timeline, spans=tuple(span for span in timeline.spans if span.kind != TaskKind.OPTIMIZER))


def _step_s(timelines: Sequence[Timeline]) -> float:
    """Returns the seconds of a step on the slowest rank."""
    return max(timeline.end_s for timeline in timelines)


def _show(rows: Sequence[Row], again_s: float, measured: Sequence[Timeline], steps_s: Sequence[float]) -> None:
    """Prints the comparison. `again_s`: the step predicted from what these steps' own tasks took."""
    print(table_of(rows), end="")
    predicted_s, step_s = rows[-1].predicted_s or 0.0, rows[-1].measured_s or 0.0
    several = f" (middle of {len(steps_s)}: {1e3 * min(steps_s):.1f} to {1e3 * max(steps_s):.1f})" * (len(steps_s) > 1)
    print(f"predicted {1e3 * predicted_s:.1f} ms, measured {1e3 * step_s:.1f} ms{several}")
    print(f"measured / predicted: {step_s / predicted_s:.2f}")
    print(f"predicted from the parts as measured: {1e3 * again_s:.1f} ms ({again_s / step_s - 1:+.1%})")
    if len(measured) > 1:
        spread = spread_of(measured)
        print(f"ranks differ by {spread:.1%} in what they compute (fusedmoe plan --machine NAME --spread {spread:.3f})")
