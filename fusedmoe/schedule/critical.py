"""Why a step takes as long as it does: its critical path, and what each layer's pass waits for.

The path goes back from the task that ends last, at each step to the one that its start waited for. Nothing on it could
have started earlier, so only what is on it can make the step shorter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task, resources_of
from fusedmoe.schedule.timeline import PHASES, RESOURCES, Span, Timeline

# What nothing in the passes that follow waits for.
_BESIDE = frozenset(("gradient-all-reduce", *WEIGHT_GRADIENTS.values()))


@dataclass(frozen=True)
class Stretch:
    """One layer's pass in a predicted step, from the end of the one before, its dense part included.

    Micro-batches are in several layers at once: what they do before the pass of the layer before has ended counts
    there. Weight gradients that are tasks of their own belong to no pass, and count where they run.

    Attributes:
        degree: its chunks.
        waits_s: seconds of the critical path during the pass by what is at work (`at_work`). Together they are the
            whole pass.
        gradient_s: of the gradient all-reduces that run meanwhile, hidden or not.
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
        """What the pass waits for most."""
        return max(self.waits_s, key=lambda resource: self.waits_s[resource])


def critical_path(plan: Plan, timeline: Timeline) -> tuple[Span, ...]:
    """The spans that the end of the step waits for, in order of time, without a gap from the start to the end.

    `timeline`: the plan's, as `simulate` gives it. Of several tasks that end together the one on the plan's sequence
    last stands for all.
    """
    spans = _spans(plan, timeline)
    if not spans:
        return ()
    place = max(range(len(spans)), key=lambda one: spans[one].end_s)
    path = [spans[place]]
    while plan.before[place]:
        place = max(plan.before[place], key=lambda one: (spans[one].end_s, one))
        path.append(spans[place])
    return tuple(reversed(path))


def stretches(plan: Plan, timeline: Timeline) -> list[Stretch]:
    """The passes of all layers, in order of time."""
    path = at_work(critical_path(plan, timeline))
    reduces = [(span.start_s, span.end_s) for span in timeline.spans if span.kind == "gradient-all-reduce"]
    own: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        if span.phase in PHASES and span.layer is not None and span.kind not in _BESIDE:
            own.setdefault((span.phase, span.layer), []).append(span)
    found: list[Stretch] = []
    start_s = 0.0
    for (phase, layer), spans in sorted(own.items(), key=lambda item: min(span.start_s for span in item[1])):
        end_s = max(span.end_s for span in spans)
        waits_s = {at: _within_s(path[at], start_s, end_s) for at in RESOURCES}
        degree = plan.degrees.get((phase, layer), 1)
        found.append(Stretch(layer, phase, degree, start_s, end_s, waits_s, _within_s(reduces, start_s, end_s)))
        start_s = end_s
    return found


def at_work(path: Iterable[Span]) -> dict[str, list[tuple[float, float]]]:
    """When what is at work along a path: by "compute", "intra" and "inter", as the kinds of tasks have it, also where a
    plan has one queue for both links. A fused operation counts as computation."""
    found: dict[str, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
    for span in path:
        found[resources_of(span.kind)[0]].append((span.start_s, span.end_s))
    return found


def _spans(plan: Plan, timeline: Timeline) -> list[Span]:
    """The span of each task in the plan's sequence."""
    by_name = {_name(span): span for span in timeline.spans}
    return [by_name[_name(task)] for task in plan.sequence]


def _name(one: Task | Span) -> tuple[str, int | None, int | None, str | None]:
    return one.kind, one.chunk, one.layer, one.phase


def _within_s(times: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in times)
