"""Hecate's sparse collectives in a plan (section 4.2): for how long the link between nodes hides them; plans with them.

Experts that are copied for an iteration are gathered before their layer's first dispatch, forward, and backward once
more where they were released in between, as those of all layers but the last may be. Gradients of the copies are
reduced after their layer's last combine. On the link all of it runs between the chunks of one layer and those of the
next, and is hidden as far as the link is idle there:

    forward    … f0.C1 f1.SAG f1.D0 …
    backward   … b1.C1 b1.SRS b0.SAG (gradient buckets) b0.D0 …

Late copies, chosen after the gate, go behind the layer's dispatches. Tokens that need them are in the last chunks, so
that the experts of the first ones do not wait, and hide them:

    forward    … f1.D0 f1.D1 f1.SAG1 f1.C0 f1.C1 …
    after f1.E0: f1.D0

How many experts can be copied in so many seconds, `placement.hecate.overlap_degree` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs, Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import GATHER, LATE, PIPELINE, REDUCE, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.timeline import Timeline, idle_s

#: No layer has late copies.
NO_LATE: Mapping[int, int] = MappingProxyType({})


def idle_before(timeline: Timeline, layer: int, phase: str) -> float:
    """Returns the seconds in which the link between nodes is idle from the last combine to a layer's first dispatch.

    Raises `ConfigError` for a layer that sends nothing between nodes in this pass.
    """
    rows = [span for span in timeline.on("inter") if span.kind in PIPELINE]
    own = [span.start_s for span in rows if (span.layer, span.phase) == (layer, phase)]
    if not own:
        raise ConfigError(f"timeline: layer {layer} has no dispatch between nodes in its {phase} pass")
    first_s = min(own)
    # The last combine of whichever layer and pass; nothing is combined before the first layer forward.
    since_s = max((span.end_s for span in rows if span.start_s < first_s), default=timeline.start_s)
    return idle_s(timeline.on("inter"), since_s, first_s)


def idle_after(timeline: Timeline) -> float:
    """Returns the idle seconds of that link from the last combine of all to the optimizer, or to the timeline's end."""
    since_s = max((span.end_s for span in timeline.on("inter") if span.kind in PIPELINE), default=timeline.start_s)
    ends_s = min((span.start_s for span in timeline.spans if span.kind == TaskKind.OPTIMIZER), default=timeline.end_s)
    return idle_s(timeline.on("inter"), since_s, max(since_s, ends_s))


def hidden_s(timeline: Timeline, layers: int, *, again: bool) -> tuple[float, ...]:
    """Returns [L]: the seconds that each sparse collective of a layer may take without making the step longer.

    `again`: experts are released and gathered once more.
    """
    # What is gathered backward and what is reduced before it have half of the time each.
    backward = [idle_before(timeline, layer, "backward") / (1 + again) for layer in range(layers - 1)]
    hidden = []
    for layer in range(layers):
        # A reduce-scatter has the time before the next dispatch backward, or after the last combine of all.
        reduce_s = backward[layer - 1] if layer else idle_after(timeline)
        gather_s = backward[layer] if again and layer < layers - 1 else reduce_s
        hidden.append(min(idle_before(timeline, layer, "forward"), reduce_s, gather_s))
    return tuple(hidden)


def add_sparse(
    plan: Plan, layers: Iterable[int], *, again: Collection[int] = (), late: Mapping[int, int] = NO_LATE
) -> Plan:
    """Returns the plan with the sparse collectives of some layers, in the passes that it has of them.

    Args:
        again: of these layers, those that release their copies after the forward pass and gather them once more.
        late: those whose copies are late in the forward pass, with the first chunk that needs these (the number of all
            chunks: none does).

    Raises `ConfigError` for a layer that sends nothing between nodes in a pass of the plan.
    """
    inter, after, phases = list(plan.inter), dict(plan.after), {task.phase for task in plan}
    for layer in layers:
        for kind, phase in ((GATHER, "forward"), (REDUCE, "backward"), (GATHER, "backward")):
            if phase not in phases or (kind == GATHER and phase == "backward" and layer not in again):
                continue
            own = [n for n, task in enumerate(inter) if (task.layer, task.phase) == (layer, phase)]
            own = [n for n in own if inter[n].kind in PIPELINE]
            if not own:
                raise ConfigError(f"plan: layer {layer} has no dispatch between nodes in its {phase} pass")
            task = Task(kind, None, layer, phase)
            if kind == REDUCE:
                # Weight gradients may run beside the next layer's chunks, behind the layer's own last combine.
                place = max(own[-1], _last_before(plan, inter, layer)) + 1
            elif phase == "forward" and layer in late:
                task = task._replace(chunk=LATE)
                # Behind rows, but ahead of all that waits for experts, which may wait for the copies.
                place = next((n for n in own if inter[n].kind in PIPELINE[3:]), own[-1] + 1)
                experts = (Task(TaskKind.EXPERT, chunk, layer, phase) for chunk in range(late[layer]))
                after |= {expert: plan.dependencies[expert] for expert in experts if expert in plan.dependencies}
            else:
                place = own[0]
                # Ahead of gradient buckets, too, which nothing waits for.
                while place and inter[place - 1].kind == TaskKind.GRADIENT_ALL_REDUCE:
                    place -= 1
            inter.insert(place, task)
    return Plan(plan.compute, plan.intra, tuple(inter), after)


def with_sparse(
    plan: Plan, costs: Costs, seconds_L: Sequence[float], *, again: bool, late: Mapping[int, int] = NO_LATE
) -> tuple[Plan, Durations]:
    """Returns the plan of a step with the sparse collectives of its layers, and its costs.

    Args:
        seconds_L: seconds of each sparse collective of a layer; a layer with 0 has none.
        again: experts are released after the forward pass and gathered once more backward, but for the last layer's.
        late: as for `add_sparse`.
    """
    layers = [layer for layer, seconds in enumerate(seconds_L) if seconds]
    found = add_sparse(plan, layers, again=range(len(seconds_L) - 1) if again else (), late=late)
    sparse = {task: seconds_L[task.layer or 0] for task in found.inter if task.kind in (GATHER, REDUCE)}
    return found, Durations({**costs.seconds(plan), **sparse}, costs.contention)


def _last_before(plan: Plan, inter: Sequence[Task], layer: int) -> int:
    """Returns the place of the last task that a layer's experts wait for backward, by whatever way; −1: nowhere."""
    number = {task: place for place, task in enumerate(plan.sequence)}
    own = [task for task in plan.compute if (task.layer, task.phase) == (layer, "backward")]
    ahead = [number[task] for task in own if task.kind in (TaskKind.EXPERT, WEIGHT_GRADIENTS[TaskKind.EXPERT])]
    seen: set[Task] = set()
    while ahead:
        place = ahead.pop()
        if plan.sequence[place] not in seen:
            seen.add(plan.sequence[place])
            ahead += plan.before[place]
    return max((place for place, task in enumerate(inter) if task in seen), default=-1)
