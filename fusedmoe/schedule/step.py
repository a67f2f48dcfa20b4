"""The plan of a whole training step: layers forward, then backward, with the gradient all-reduces between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusedmoe.schedule.gradient import Stream
from fusedmoe.schedule.list_schedule import fill_idle_slots
from fusedmoe.schedule.orders import Order
from fusedmoe.schedule.partition import Partition
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.task import PIPELINE, ROADS, Task
from fusedmoe.schedule.timeline import RESOURCES

_GRADIENT = "gradient-all-reduce"


class Pass(NamedTuple):
    """How one layer's chunks go through one pass."""

    order: Order
    degree: int


def step_plan(
    costs: StackCosts,
    forward: Sequence[Pass],
    backward: Sequence[Pass],
    partition: Partition | None = None,
    *,
    exposed: bool = False,
) -> Plan:
    """The plan of a step of the layers that `costs` has, with the parts that it has of each.

    `forward`, `backward`: one for each layer. `partition`: gradients that are reduced on the way; what is left over
    follows the last combine, in one piece. `exposed`: all gradients wait for the end of the backward pass, and go one
    layer at a time.
    """
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}
    last = len(costs.layers)
    stream = Stream(costs.gradient_bytes)
    for layer in range(last):
        _add_pass(orders, costs, forward[layer], "forward", layer, [])
    if costs.loss_s is not None:
        orders["compute"].append(Task("loss", None, None, None))
    for layer in reversed(range(last)):
        middle, beside = (0.0, 0.0) if partition is None else (partition.middle[layer], partition.beside[layer])
        _add_pass(orders, costs, backward[layer], "backward", layer, _pieces(stream, middle, layer + 1))
        orders["inter"] += _pieces(stream, beside, layer + 1)
    after = {}
    for layer in reversed(range(last)) if exposed else (0,):
        pieces = _pieces(stream, stream.available(layer), layer)
        orders["inter"] += pieces
        if exposed:
            after.update({piece: (orders["compute"][-1],) for piece in pieces})
    if costs.optimizer_s is not None:
        orders["compute"].append(Task("optimizer", None, None, None))
    return Plan.of(orders, after)


def idle_slot_plan(costs: StackCosts, forward: Sequence[Pass], backward: Sequence[Pass], piece_bytes: int) -> Plan:
    """The plan of a step whose gradients go in pieces, each as soon as `inter` has nothing else to do.

    A piece never reaches over the end of a layer's gradient.
    """
    bare = step_plan(costs, forward, backward)
    orders = {resource: [task for task in bare.on(resource) if task.kind != _GRADIENT] for resource in RESOURCES}
    pieces = gradient_pieces(costs.gradient_bytes, piece_bytes)
    return fill_idle_slots(orders, costs.seconds(bare), pieces, costs.all_reduce)


def gradient_pieces(gradient_bytes: Sequence[int], piece_bytes: int | None) -> list[Task]:
    """Of `piece_bytes` each, the last of a layer smaller (None: each layer's in one); in back-propagation's order."""
    return [
        Task(_GRADIENT, number, layer, "backward", min(piece_bytes or size, size - start))
        for layer, size in reversed(list(enumerate(gradient_bytes)))
        for number, start in enumerate(range(0, size, piece_bytes or size or 1))
    ]


def _pieces(stream: Stream, size: float, layer: int) -> list[Task]:
    piece = stream.cut(size, layer)
    return [] if piece is None else [piece]


def _add_pass(
    orders: dict[str, list[Task]], costs: StackCosts, how: Pass, phase: str, layer: int, pieces: list[Task]
) -> None:
    chunks, dense = costs.layers[layer].chunks[phase], costs.layers[layer].dense_s[phase]
    road = ROADS[phase]
    first, last = road.index(PIPELINE[0]), road.index(PIPELINE[-1])
    orders["compute"] += [Task(kind, None, layer, phase) for kind in road[:first] if kind in dense]
    for resource, tasks in how.order(chunks, how.degree, phase, layer, pieces).items():
        orders[resource] += tasks
    orders["compute"] += [Task(kind, None, layer, phase) for kind in road[last + 1 :] if kind in dense]
