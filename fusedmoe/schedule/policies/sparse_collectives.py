"""Hecate's sparse collectives in plans (section 4.2), and the inter-node link's idle time that can hide them.

Expert replicas are gathered before their layer's first forward dispatch. Layers other than the last may release them
after the forward pass and gather them again backward. Gradients of replicas are reduced after their layer's last
combine. All run on the inter-node link between the chunks of consecutive layers:

    forward    … f0.C1 f1.SAG f1.D0 …
    backward   … b1.C1 b1.SRS b0.SAG (gradient buckets) b0.D0 …
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Costs, TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import is_chunk
from fusedmoe.schedule.task import PIPELINE, SPARSE_GATHER, SPARSE_REDUCE, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.timeline import Timeline, idle_s


def idle_before_s(timeline: Timeline, layer: int, phase: str) -> float:
    """Return the inter-node link's idle seconds between the preceding pipeline and a layer's first dispatch.

    Raises `ConfigError` for a layer without inter-node traffic in this pass.
    """
    rows = [span for span in timeline.on("inter") if span.kind in PIPELINE]
    own = [span.start_s for span in rows if (span.layer, span.phase) == (layer, phase)]
    if not own:
        raise ConfigError(f"timeline: layer {layer} has no dispatch between nodes in its {phase} pass")
    first_s = min(own)
    since_s = max((span.end_s for span in rows if span.start_s < first_s), default=timeline.start_s)
    return idle_s(timeline.on("inter"), since_s, first_s)


def idle_after_s(timeline: Timeline) -> float:
    """Return the inter-node link's idle seconds between the last combine and the optimizer or end."""
    since_s = max((span.end_s for span in timeline.on("inter") if span.kind in PIPELINE), default=timeline.start_s)
    ends_s = min((span.start_s for span in timeline.spans if span.kind == TaskKind.OPTIMIZER), default=timeline.end_s)
    return idle_s(timeline.on("inter"), since_s, max(since_s, ends_s))


def hidden_s(timeline: Timeline, layers: int, *, again: bool) -> tuple[float, ...]:
    """Return [L]: seconds that each sparse collective of a layer can take without lengthening the step.

    `again`: replicas are released and gathered again.
    """
    # The backward gather and the reduction before it share the time.
    backward = [idle_before_s(timeline, layer, "backward") / (1 + again) for layer in range(layers - 1)]
    hidden = []
    for layer in range(layers):
        # A reduction can use the time before the next backward dispatch, or after the last combine.
        reduce_s = backward[layer - 1] if layer else idle_after_s(timeline)
        gather_s = backward[layer] if again and layer < layers - 1 else reduce_s
        hidden.append(min(idle_before_s(timeline, layer, "forward"), reduce_s, gather_s))
    return tuple(hidden)


def add_sparse_collectives(plan: Plan, layers: Iterable[int], *, again: Collection[int] = ()) -> Plan:
    """Return the plan with sparse collectives of some layers, in all its passes.

    `again`: layers that gather their replicas again in the backward pass. Raises `ConfigError` for a layer without
    inter-node traffic in a pass.
    """
    inter, phases = list(plan.inter), {task.phase for task in plan}
    for layer in layers:
        for kind, phase in ((SPARSE_GATHER, "forward"), (SPARSE_REDUCE, "backward"), (SPARSE_GATHER, "backward")):
            if phase not in phases or (kind == SPARSE_GATHER and phase == "backward" and layer not in again):
                continue
            own = [n for n, task in enumerate(inter) if is_chunk(task, layer, phase)]
            if not own:
                raise ConfigError(f"plan: layer {layer} has no dispatch between nodes in its {phase} pass")
            task = Task(kind, None, layer, phase)
            if kind == SPARSE_REDUCE:
                # Weight gradients may overlap with the next layer's chunks.
                place = max(own[-1], _last_before(plan, inter, layer)) + 1
            else:
                place = own[0]
                # Before gradient buckets, on which no chunk depends.
                while place and inter[place - 1].kind == TaskKind.GRADIENT_ALL_REDUCE:
                    place -= 1
            inter.insert(place, task)
    return Plan(plan.compute, plan.intra, tuple(inter), plan.after)


def with_sparse_collectives(
    plan: Plan, costs: Costs, seconds_L: Sequence[float], *, again: bool
) -> tuple[Plan, TaskDurations]:
    """Return the plan of a step with sparse collectives, and its costs.

    Args:
        seconds_L: seconds of each sparse collective of a layer; 0: the layer has none.
        again: replicas are released and gathered again, except in the last layer.
    """
    layers = [layer for layer, seconds in enumerate(seconds_L) if seconds]
    found = add_sparse_collectives(plan, layers, again=range(len(seconds_L) - 1) if again else ())
    sparse = {task: seconds_L[task.layer or 0] for task in found.inter if task.kind in (SPARSE_GATHER, SPARSE_REDUCE)}
    return found, TaskDurations({**costs.seconds(plan), **sparse}, costs.contention)


def _last_before(plan: Plan, inter: Sequence[Task], layer: int) -> int:
    """Return the index on `inter` of the last transitive dependency of a layer's backward experts, or −1."""
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
