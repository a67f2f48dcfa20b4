"""Interleaved runs on all ranks of a setting, and the result rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from bench.cluster.setting import Setting
from fusedmoe.comm.collectives import all_gather_object, all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import PartComparison, compare_parts, observe_task_times, refit
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.timeline import Timeline

_REFIT_STEPS = 3


def seconds_of(topology: Topology, call: Callable[[], Any]) -> float:
    """Return this rank's time of a call that all ranks start together, in seconds."""
    all_reduce(topology.world, torch.zeros(1), operation="start of a measurement")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(
    topology: Topology,
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the slowest rank's time of each run by round, in seconds. Each round starts with another run.

    `prepare`: called before each run, not timed. Rank 0 prints the remaining time.
    """
    own: dict[str, list[float]] = {name: [] for name in runs}
    names, began = list(runs), time.monotonic()
    for number in range(1 + rounds):  # the first is a warm-up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            prepare(name)
            torch.manual_seed(1000 * number + topology.rank)
            taken = seconds_of(topology, runs[name])
            if number:
                own[name].append(taken)
        left_s = (time.monotonic() - began) / (number + 1) * (rounds - number)
        tell(topology, f"  round {number} of {rounds}, {left_s:.0f} s to go")
    every = all_gather_object(topology.world, own)
    return {name: [max(of) for of in zip(*(rank[name] for rank in every), strict=True)] for name in names}


def first_of(keys: Mapping[str, Hashable]) -> dict[str, str]:
    """Return for each name the first name with the same key, so that equal plans are measured once."""
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(key, name) for name, key in keys.items()}


def row(seconds: list[float]) -> dict[str, Any]:
    return {**spread(seconds), "rounds_s": seconds}


def recorded_step(topology: Topology, step: Callable[[Recorder], object]) -> Timeline:
    recorder = Recorder(topology.rank)
    step(recorder)
    return recorder.timeline()


class Refitted(NamedTuple):
    """Costs refitted to a few steps of a plan, and each part's predicted and measured seconds in the median step."""

    costs: StepCosts
    parts: list[PartComparison]


def refitted(topology: Topology, plan: Plan, costs: StepCosts, run: Callable[[], Timeline]) -> Refitted:
    run()
    steps = []
    for _ in range(_REFIT_STEPS):
        all_reduce(topology.world, torch.zeros(1), operation="start of a measurement")
        steps.append(all_gather_object(topology.world, run()))
    middle = sorted(steps, key=lambda ranks: max(timeline.end_s for timeline in ranks))[len(steps) // 2]
    return Refitted(refit(costs, observe_task_times(plan, costs, steps)), compare_parts(plan, costs, middle))


def predicted(
    median_s: float, predicted_s: float, plan: Plan | None = None, later: Refitted | None = None
) -> dict[str, Any]:
    """Return the predicted time for a row: with the initial costs, and with costs refitted to its first steps."""
    found: dict[str, Any] = {"predicted_s": predicted_s, "error": predicted_s / median_s - 1.0}
    if plan is not None and later is not None:
        refit_s = makespan(plan, later.costs)
        found |= {
            "refit_s": refit_s,
            "refit_error": refit_s / median_s - 1.0,
            "parts": [list(one) for one in later.parts],
        }
    return found


def planned(plan: Plan) -> dict[str, Any]:
    return {"degrees": degrees_of(plan), "plan": str(plan)}


def beside(rows: dict[str, dict[str, Any]], first: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Add speed-ups over "off" (if present) and over sequential chunks to all rows; `first`: from `first_of`."""
    first = first or {name: name for name in rows}
    found = {name: rows[of] | ({} if name == of else {"same_as": of}) for name, of in first.items()}
    for name, base in (("over_off", "off"), ("over_sequential", "sequential")):
        if base in found:
            for one in found.values():
                one[name] = found[base]["median_s"] / one["median_s"]
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def degrees_of(plan: Plan) -> tuple[int, int]:
    found = plan.degrees
    forward, backward = (max(r for (phase, _), r in found.items() if phase == of) for of in ("forward", "backward"))
    return forward, backward


def setting_json(setting: Setting) -> dict[str, Any]:
    words = "real, float32 on one thread a rank"
    if setting.emulated_flops is not None:
        words = f"EMULATED: timed waits of the length that {setting.emulated_flops:.3g} FLOP/s take; "
        words += "communication is real"
    return vars(setting) | {"ranks": setting.ranks, "computation": words}


def tell(topology: Topology, what: str) -> None:
    if topology.rank == 0:
        print(f"  {time.strftime('%H:%M:%S')}  {what}", flush=True)
