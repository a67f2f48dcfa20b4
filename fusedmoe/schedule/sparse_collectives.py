"""Sparse collectives in a plan (Hecate, section 4.2): for how long the link between nodes hides them; plans with them.

Experts that are copied for an iteration are gathered before their layer's first dispatch, forward, and backward once
more where they were released in between, as those of all layers but the last may be. Gradients of the copies are
reduced after their layer's last combine. On the link all of it runs between the chunks of one layer and those of the
next, and is hidden as far as the link is idle there:

    forward    … f0.C1 f1.SAG f1.D0 …
    backward   … b1.C1 b1.SRS b0.SAG (gradient buckets) b0.D0 …

How many experts can be copied in so many seconds, `placement.materialise.overlap_degree` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs, Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task
from fusedmoe.schedule.timeline import Timeline

GATHER, REDUCE = "sparse-all-gather", "sparse-reduce-scatter"


def idle_before(timeline: Timeline, layer: int, phase: str) -> float:
    """Seconds in which the link between nodes is idle before a layer's first dispatch, since the last combine.

    That is the last one that ended until then, of whichever layer and pass; for the first layer forward, since the
    timeline's start. Gradient buckets and sparse collectives that run in between keep the link busy.

    Raises:
        ConfigError: the layer sends nothing between nodes in this pass.
    """
    rows = [span for span in timeline.on("inter") if span.kind in PIPELINE]
    own = [span.start_s for span in rows if (span.layer, span.phase) == (layer, phase)]
    if not own:
        raise ConfigError(f"timeline: layer {layer} has no dispatch between nodes in its {phase} pass")
    first_s = min(own)
    since_s = max((span.end_s for span in rows if span.start_s < first_s), default=timeline.start_s)
    return _idle_s(timeline, since_s, first_s)


def idle_after(timeline: Timeline) -> float:
    """The same from the last combine of all to the optimizer; without one, to the end of the timeline."""
    since_s = max((span.end_s for span in timeline.on("inter") if span.kind in PIPELINE), default=timeline.start_s)
    ends_s = min((span.start_s for span in timeline.spans if span.kind == "optimizer"), default=timeline.end_s)
    return _idle_s(timeline, since_s, max(since_s, ends_s))


def hidden_s(timeline: Timeline, layers: int, *, again: bool) -> tuple[float, ...]:
    """[L]: how long each sparse collective of a layer may take without making the step longer.

    A gather forward has the time before its layer's dispatch, a reduce-scatter that before the next dispatch backward,
    or after the last combine of all. `again`: experts are released and gathered once more; what is gathered backward
    and what is reduced before it have half of the time each.
    """
    backward = [idle_before(timeline, layer, "backward") / (1 + again) for layer in range(layers - 1)]
    found = []
    for layer in range(layers):
        reduce_s = backward[layer - 1] if layer else idle_after(timeline)
        gather_s = backward[layer] if again and layer < layers - 1 else reduce_s
        found.append(min(idle_before(timeline, layer, "forward"), reduce_s, gather_s))
    return tuple(found)


def with_sparse(plan: Plan, costs: Costs, seconds_L: Sequence[float], *, again: bool) -> tuple[Plan, Durations]:
    """The plan of a step with the sparse collectives of its layers, and what that costs.

    Args:
        seconds_L: of each sparse collective of a layer; a layer with 0 has none.
        again: experts are released after the forward pass and gathered once more backward, but for the last layer's.
    Raises:
        ConfigError: a layer with sparse collectives that sends nothing between nodes, or whose weight gradients run
            beside the next layer's chunks, before which their sum stands.
    """
    inter, after = list(plan.inter), dict(plan.after)
    sparse: dict[Task, float] = {}
    for layer, seconds in enumerate(seconds_L):
        if not seconds:
            continue
        reduce = Task(REDUCE, None, layer, "backward")
        after[reduce] = _gradients(plan, layer)
        phases = ("forward", "backward") if again and layer < len(seconds_L) - 1 else ("forward",)
        for task in (*(Task(GATHER, None, layer, phase) for phase in phases), reduce):
            sparse[task] = seconds
            own = [
                place for place, one in enumerate(inter) if (one.layer, one.phase) == task[2:4] and one.kind in PIPELINE
            ]
            if not own:
                raise ConfigError(f"plan: layer {layer} has no dispatch between nodes in its {task.phase} pass")
            inter.insert(own[-1] + 1 if task is reduce else _ahead(inter, own[0]), task)
    found = Plan(plan.compute, plan.intra, tuple(inter), after)
    return found, Durations({**costs.seconds(plan), **sparse}, costs.contention)


def _ahead(inter: Sequence[Task], first: int) -> int:
    """Where a gather stands before a layer's first dispatch: ahead of gradient buckets, which nobody waits for."""
    place = first
    while place and inter[place - 1].kind == "gradient-all-reduce":
        place -= 1
    return place


def _gradients(plan: Plan, layer: int) -> tuple[Task, ...]:
    """What computes the gradients of a layer's experts: its W tasks where the backward pass is split."""
    own = [task for task in plan.compute if (task.layer, task.phase) == (layer, "backward")]
    apart = [task for task in own if task.kind == WEIGHT_GRADIENTS["expert"]]
    return tuple(apart or [task for task in own if task.kind == "expert"])


def _idle_s(timeline: Timeline, since_s: float, until_s: float) -> float:
    """How long the link between nodes has nothing to do in this time."""
    spans = timeline.on("inter")
    cut = [one._replace(start_s=max(one.start_s, since_s), end_s=min(one.end_s, until_s)) for one in spans]
    busy = Timeline(spans=tuple(one for one in cut if one.start_s < one.end_s)).busy_s("inter")
    return max(0.0, until_s - since_s - busy)
