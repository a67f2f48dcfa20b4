"""Plans of a whole step in micro-batches: attention is split as well, and chunks go on from layer to layer (FlowMoE).

A step is what it was, with every layer's parts in chunks from its attention to its combine; chunk i of a layer waits
for chunk i of the layer before and for no other. Weight gradients may be tasks of their own (Lancet): what waits for a
pass waits for the gradients of its input only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.chunks import work_s
from fusedmoe.schedule.list_schedule import ListSchedule, list_plan
from fusedmoe.schedule.passes import links_bound_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.step import gradient_pieces
from fusedmoe.schedule.task import ROADS, WEIGHT_GRADIENTS, Task, weight_gradient
from fusedmoe.schedule.timeline import PHASES, RESOURCES


class Split(NamedTuple):
    """How a step is split.

    `forward`, `backward`: micro-batches of both passes. `piece_bytes`: of a gradient all-reduce (S_p); None: a layer's
    in one piece. `weights`: weight gradients are tasks of their own.
    """

    forward: int
    backward: int
    piece_bytes: int | None = None
    weights: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Split:
        """How a plan of `micro_schedule` is split. Its `piece_bytes` are those of the largest piece there is."""
        degrees = plan.degrees.items()
        forward, backward = (max(degree for (phase, _), degree in degrees if phase == one) for one in PHASES)
        piece_bytes = max((task.size or 0 for task in plan.inter if task.kind == "gradient-all-reduce"), default=None)
        weights = any(task.kind in WEIGHT_GRADIENTS.values() for task in plan.compute)
        return cls(forward, backward, piece_bytes, weights)


def micro_schedule(costs: StackCosts, split: Split) -> ListSchedule:
    """A step that is split so, every order by list scheduling: its plan, and its makespan at a fraction of the cost.

    Raises:
        ConfigError: layers that cannot be split (`LayerCosts.micro`).
    """
    tasks = list(_step_tasks(costs, split))
    return ListSchedule(tasks, task_seconds(costs, tasks, split))


def exposed_plan(costs: StackCosts, split: Split) -> Plan:
    """The plan of a step that is split so, where all gradients wait for the end of the backward pass.

    Raises:
        ConfigError: layers that cannot be split.
    """
    late = ("gradient-all-reduce", "optimizer")
    found = list(_step_tasks(costs, split))
    tasks = [task for task in found if task.kind not in late]
    plan = list_plan(tasks, task_seconds(costs, tasks, split))
    pieces, end = ([task for task in found if task.kind == kind] for kind in late)
    orders = {"compute": [*plan.compute, *end], "intra": plan.intra, "inter": [*plan.inter, *pieces]}
    return Plan.of(orders, {piece: plan.compute[-1:] for piece in pieces})


def split_bound_s(costs: StackCosts, split: Split) -> float:
    """Seconds that no order of a step that is split so beats: the busiest resource's tasks."""
    on = dict.fromkeys(RESOURCES, 0.0)
    known: dict[tuple[int, str], dict[str, float]] = {}  # layers are often one object many times
    for layer in costs.layers:
        for phase, degree in (("forward", split.forward), ("backward", split.backward)):
            if (id(layer), phase) not in known:
                known[id(layer), phase] = _pass_s(layer, phase, degree)
            for resource, seconds in known[id(layer), phase].items():
                on[resource] += seconds
    pieces = gradient_pieces(costs.gradient_bytes, split.piece_bytes)
    on["inter"] += sum(costs.all_reduce.seconds(piece.size or 0) for piece in pieces)
    compute = on["compute"] + (costs.loss_s or 0.0) + (costs.optimizer_s or 0.0)
    return max(compute, links_bound_s(on["inter"], on["intra"], costs.contention))


def _pass_s(layer: LayerCosts, phase: str, degree: int) -> dict[str, float]:
    """Seconds of one layer's tasks by resource. Weight gradients take as long by themselves."""
    if layer.micro is None:
        raise ConfigError("micro-batches: a layer cannot be split; nothing is known of its dense part in pieces")
    return work_s({**layer.micro.dense[phase], **layer.chunks[phase]}, degree)


def forward_plan(costs: StackCosts, layers: Iterable[int], degree: int) -> Plan:
    """The forward pass of some layers that follow each other, in micro-batches, by list scheduling."""
    tasks = [task for layer in layers for task in pass_tasks(costs, layer, "forward", degree)]
    return list_plan(tasks, task_seconds(costs, tasks, Split(degree, 1)))


def pass_tasks(costs: StackCosts, layer: int, phase: str, degree: int) -> Iterator[Task]:
    """All parts of one layer's pass in so many micro-batches, in the order in which rows go through them."""
    of = costs.layers[layer]
    if of.micro is None:
        raise ConfigError(f"micro-batches: layer {layer} cannot be split; nothing is known of its dense part in pieces")
    for kind in ROADS[phase]:
        if kind == "order" and phase == "forward" and of.micro.waits:
            yield Task(kind, None, layer, phase)
        elif kind in of.chunks[phase] or kind in of.micro.dense[phase]:
            for chunk in range(degree):
                yield Task(kind, chunk, layer, phase)


def with_weights(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks of a backward pass, behind each the weight gradient that is cut off from it."""
    for task in tasks:
        yield task
        kind = weight_gradient(task.kind)
        if kind is not None:
            yield task._replace(kind=kind)


def task_seconds(costs: StackCosts, tasks: Iterable[Task], split: Split) -> dict[Task, float]:
    """The duration of each."""
    degrees = {"forward": split.forward, "backward": split.backward, None: split.forward}
    known: dict[tuple[str, int | None, str | None], float] = {}
    seconds = {}
    for task in tasks:
        kind, chunk, layer, phase, size = task
        if size is not None:
            seconds[task] = costs.all_reduce.seconds(size)
            continue
        if (kind, layer, phase) not in known:
            cut = split.weights and phase == "backward" and weight_gradient(kind) is not None
            known[kind, layer, phase] = costs.task_s(task, 1 if chunk is None else degrees[phase], cut)
        seconds[task] = known[kind, layer, phase]
    return seconds


def _step_tasks(costs: StackCosts, split: Split) -> Iterator[Task]:
    layers = range(len(costs.layers))
    for layer in layers:
        yield from pass_tasks(costs, layer, "forward", split.forward)
    if costs.loss_s is not None:
        yield from (Task("loss", chunk, None, None) for chunk in range(split.forward))
    pieces: dict[int, list[Task]] = {}
    for piece in gradient_pieces(costs.gradient_bytes, split.piece_bytes):
        pieces.setdefault(piece.layer or 0, []).append(piece)
    for layer in reversed(layers):
        tasks = pass_tasks(costs, layer, "backward", split.backward)
        yield from with_weights(tasks) if split.weights else tasks
        yield from pieces.get(layer, ())
    if costs.optimizer_s is not None:
        yield Task("optimizer", None, None, None)
