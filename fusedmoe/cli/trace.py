"""`fusedmoe trace`: record steps on all ranks and compare them with the prediction."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, StopRequest, command_group, format_ranks, resolve_sizes
from fusedmoe.cli.settings import Settings, describe, given_settings, read_costs
from fusedmoe.cli.step_plans import (
    PlannedJob,
    compute_dtype,
    describe_costs,
    followed_policy,
    follows_plan,
    format_rows,
    make_meta_model,
)
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.errors import ConfigError, printable
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.schedule import POLICIES, Plan, StepCosts, draw, simulate
from fusedmoe.schedule.draw import MAX_TIMELINES
from fusedmoe.schedule.machines import measured_spread
from fusedmoe.schedule.refit import PartComparison, compare_parts, observe_task_times, refit
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import TaskKind
from fusedmoe.schedule.timeline import Timeline, align_timelines, save_trace

_WARM_UP = 2


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1")
    launch = Launch.from_environment()
    settings = Settings(schedule="auto").changed(given_settings(arguments))
    given = None if arguments.costs is None else read_costs(arguments.costs)
    sizes, settings = resolve_sizes(settings, launch)
    settings.model.require_byte_vocabulary()
    followed_policy(settings, sizes)  # raises before the machine is measured
    with command_group(settings, launch, sizes, "fusedmoe trace") as (topology, device):
        costs = given or cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
        corpus = random_corpus(64 * settings.model.seq_len)
        trainer = Trainer(settings, topology, device, corpus, StopRequest())
        planned: tuple[Plan, StepCosts]
        if follows_plan(settings, sizes.ep, sizes.esp):
            planned = trainer.set_plan(costs if given else trainer.with_measured_times(costs))
        else:
            step = PlannedJob(settings, launch.ranks, sizes, costs, make_meta_model(settings)).step_costs()
            planned = POLICIES["sequential"].plan(step), step
        numbers = range(_WARM_UP + arguments.steps)
        own = [trainer.recorded_step(number)[1] for number in numbers][_WARM_UP:]
        ranks = all_gather_object(topology.world, own, "gathering timelines")
    if launch.rank == 0:
        by_step = [list(timelines) for timelines in zip(*ranks, strict=True)]
        # The cost model may lack the optimizer.
        if planned[1].optimizer_s is None:
            for timelines in by_step:
                for place, timeline in enumerate(timelines):
                    spans = (span for span in timeline.spans if span.kind != TaskKind.OPTIMIZER)
                    timelines[place] = replace(timeline, spans=tuple(spans))
        # Other load on the machine may disturb any single step.
        middle = sorted(by_step, key=_step_s)[(len(by_step) - 1) // 2]
        schedule = f"schedule {settings.schedule}"
        if settings.schedule != "off" and not follows_plan(settings, sizes.ep, sizes.esp):
            schedule += " (no plan: no communication between ranks)"
        elif trainer.tuning is not None:
            schedule += f" (best prediction: {trainer.plan_name})"
        title = f"{settings.model.label}, {format_ranks(launch.ranks)}, {schedule}"
        both = [simulate(*planned), *align_timelines(middle)]
        draw(both[:MAX_TIMELINES], arguments.png, title=title)
        save_trace(both, arguments.json)
        print(describe(settings.model))
        print(printable(f"{topology}, {schedule}"))
        print(describe_costs(costs))
        plan, step_costs_then = planned
        refitted_s = makespan(plan, refit(step_costs_then, observe_task_times(plan, step_costs_then, by_step)))
        steps_s = [_step_s(timelines) for timelines in by_step]
        _show(compare_parts(*planned, middle), refitted_s, simulate(*planned), middle, steps_s)
        print(printable(f"{arguments.png}, {arguments.json}"))
    return 0


def _step_s(timelines: Sequence[Timeline]) -> float:
    return max(timeline.end_s for timeline in timelines)


def _show(
    rows: Sequence[PartComparison],
    refitted_s: float,
    predicted: Timeline,
    measured: Sequence[Timeline],
    steps_s: Sequence[float],
) -> None:
    """Print the comparison. `refitted_s`: step time simulated from the task times of these steps, in seconds."""
    print(format_rows(rows), end="")
    predicted_s, step_s = rows[-1].predicted_s or 0.0, rows[-1].measured_s or 0.0
    several = f" (median of {len(steps_s)}: {1e3 * min(steps_s):.1f} to {1e3 * max(steps_s):.1f})" * (len(steps_s) > 1)
    print(f"predicted {1e3 * predicted_s:.1f} ms, measured {1e3 * step_s:.1f} ms{several}")
    exposed_s = statistics.mean(timeline.exposed_s() for timeline in measured)
    share = f"{exposed_s / step_s:.0%} of the step" + ", mean over ranks" * (len(measured) > 1)
    both = f"predicted {1e3 * predicted.exposed_s():.1f} ms, measured {1e3 * exposed_s:.1f} ms"
    print(f"exposed communication: {both} ({share})")
    print(f"measured / predicted: {step_s / predicted_s:.2f}")
    print(f"predicted from measured task times: {1e3 * refitted_s:.1f} ms ({refitted_s / step_s - 1:+.1%})")
    if len(measured) > 1:
        spread = measured_spread(measured)
        print(f"spread of compute time over ranks: {spread:.1%} (fusedmoe plan --machine NAME --spread {spread:.3f})")
