"""The simulator: when each task of a plan starts and ends, given what each one costs.

    timeline = simulate(plan, costs)

Three resources, each one task at a time in the plan's order; a task starts as soon as the one before it on its
resource and all that it waits for have ended. While tasks run on several resources, each of them goes on at the share
of its speed that the contention leaves it beside the others (`cost.Contention`).

A fused operation starts as soon as it is the next one on both of its resources, and holds them until it ends.

Why a step takes as long as it does: its critical path goes back from the task that ends last, at each step to the one
that its start waited for. Nothing on it could have started earlier, so only what is on it can make the step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs
from fusedmoe.schedule.events import run, run_in_order
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.task import PHASES, RESOURCES, WEIGHT_GRADIENTS, Task, TaskKind, resources_of
from fusedmoe.schedule.timeline import Span, Timeline

#: Of seconds, relatively: times that differ by no more are equal. Sums in another order differ by less.
ROUNDING = 1e-9

# What nothing in the passes that follow waits for.
_BESIDE = frozenset((TaskKind.GRADIENT_ALL_REDUCE, *WEIGHT_GRADIENTS.values()))


def simulate(plan: Plan, costs: Costs, rank: int = 0) -> Timeline:
    """Returns the predicted timeline of a plan, from 0 on.

    Raises `ConfigError`, naming the task, for a task without a duration or with one that is negative or not finite.
    """
    starts, ends = _times(plan, costs)
    # A task is where its kind works: an all-gather on the links inside a node, also in a plan with one queue for both.
    occupied = (resources_of(task.kind) for task in plan.sequence)
    spans = tuple(
        Span(kind, kind, on[0], start, end, chunk, layer, phase, on[1:])
        for (kind, chunk, layer, phase, _), on, start, end in zip(plan.sequence, occupied, starts, ends, strict=True)
    )
    return Timeline(rank, spans, "predicted")


def makespan(plan: Plan, costs: Costs) -> float:
    """Returns the end of the last task, in seconds: the `end_s` of the simulated timeline, at less cost."""
    return max(_times(plan, costs)[1], default=0.0)


def best_of(plans: Sequence[Plan], costs: Costs) -> Plan:
    """Returns the shortest plan in simulation, of equally short ones the one with the fewest tasks."""
    seconds = [makespan(plan, costs) for plan in plans]
    enough_s = min(seconds) * (1 + ROUNDING)
    # Each task takes some time that the costs do not know of.
    return min((plan for plan, took_s in zip(plans, seconds, strict=True) if took_s <= enough_s), key=len)


@dataclass(frozen=True)
class Stretch:
    """One layer's pass in a predicted step, from the end of the one before, its dense part included.

    Micro-batches are in several layers at once: what they do before the pass of the layer before has ended counts
    there. W tasks belong to no pass, and count where they run.

    Attributes:
        degree: the number of chunks.
        waits_s: seconds of the critical path during the pass by what is at work (`at_work`); their sum is the pass.
        gradient_s: seconds of the gradient all-reduces that run meanwhile, hidden or not.
    """

    layer: int
    phase: str
    degree: int
    start_s: float
    end_s: float
    waits_s: dict[str, float]
    gradient_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def bound_by(self) -> str:
        """The resource that the pass waits for most."""
        return max(self.waits_s, key=lambda resource: self.waits_s[resource])


def critical_path(plan: Plan, timeline: Timeline) -> tuple[Span, ...]:
    """Returns the spans that the end of the step waits for, in order of time, without a gap from the start to the end.

    `timeline`: the plan's, as `simulate` gives it.
    """
    by_name = {_name(span): span for span in timeline.spans}
    spans = [by_name[_name(task)] for task in plan.sequence]
    if not spans:
        return ()
    place = max(range(len(spans)), key=lambda number: spans[number].end_s)
    path = [spans[place]]
    # Of several tasks that end together the last one in the plan's sequence stands for all.
    while plan.before[place]:
        place = max(plan.before[place], key=lambda number: (spans[number].end_s, number))
        path.append(spans[place])
    return tuple(reversed(path))


def stretches(plan: Plan, timeline: Timeline) -> list[Stretch]:
    """Returns the passes of all layers, in order of time."""
    path = at_work(critical_path(plan, timeline))
    reduces = [(span.start_s, span.end_s) for span in timeline.spans if span.kind == TaskKind.GRADIENT_ALL_REDUCE]
    own: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        if span.phase in PHASES and span.layer is not None and span.kind not in _BESIDE:
            own.setdefault((span.phase, span.layer), []).append(span)
    passes: list[Stretch] = []
    start_s = 0.0
    for (phase, layer), spans in sorted(own.items(), key=lambda item: min(span.start_s for span in item[1])):
        end_s = max(span.end_s for span in spans)
        waits_s = {at: _within_s(path[at], start_s, end_s) for at in RESOURCES}
        degree = plan.degrees.get((phase, layer), 1)
        passes.append(Stretch(layer, phase, degree, start_s, end_s, waits_s, _within_s(reduces, start_s, end_s)))
        start_s = end_s
    return passes


def at_work(path: Iterable[Span]) -> dict[str, list[tuple[float, float]]]:
    """Returns the times of each resource along a path; a fused operation counts as computation."""
    times: dict[str, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
    for span in path:
        times[resources_of(span.kind)[0]].append((span.start_s, span.end_s))
    return times


def _times(plan: Plan, costs: Costs) -> tuple[list[float], list[float]]:
    """Returns starts and ends in the order of `plan.sequence`."""
    seconds, contention = costs.seconds(plan), costs.contention
    try:
        durations = [seconds[task] for task in plan.sequence]
    except KeyError as error:
        raise ConfigError(f"simulate: no duration for {name(error.args[0])}; add it to the costs") from None
    if not all(0 <= duration < math.inf for duration in durations):
        bad = next(task for task in plan.sequence if not 0 <= seconds[task] < math.inf)
        raise ConfigError(f"simulate: {name(bad)} cannot take {seconds[bad]} s")
    # Resources that do not disturb each other need no event loop: starts follow from what is waited for.
    if plan.overlaps and contention.disturbs({RESOURCES[number] for number in plan.works}):
        return run(plan.before, *plan.graph, durations, speeds=contention.speeds, works=plan.works)
    return run_in_order(plan.before, durations)


def _name(one: Task | Span) -> tuple[str, int | None, int | None, str | None]:
    return one.kind, one.chunk, one.layer, one.phase


def _within_s(times: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in times)
