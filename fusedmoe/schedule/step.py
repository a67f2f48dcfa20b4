"""The tasks of a training step: layers forward, then backward, with the gradient all-reduces between them.

In micro-batches attention is split as well, and chunks go on from layer to layer (FlowMoE): chunk i of a layer waits
for chunk i of the layer before and for no other. Each part of each layer may be in chunks of its own. The backward pass
may be split, too, into gradients of inputs and W tasks for those of weights (Lancet): what waits for a pass waits for
the gradients of its input only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from fusedmoe.schedule.list_schedule import fill_idle_slots
from fusedmoe.schedule.passes import Order, Partition
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import StepCosts, gradient_ends
from fusedmoe.schedule.task import LINKS, PIPELINE, RESOURCES, STAGES, WEIGHT_GRADIENTS, Task, TaskKind, resources_of

#: Buckets start and end at multiples of this many bytes, or at the end of a layer's gradient.
ALIGNMENT = 256


class ChunkedPass(NamedTuple):
    """An order and a number of chunks: the way of one layer's chunks through one pass."""

    order: Order
    degree: int


def step_plan(
    costs: StepCosts,
    forward: Sequence[ChunkedPass],
    backward: Sequence[ChunkedPass],
    partition: Partition | None = None,
    *,
    exposed: bool = False,
) -> Plan:
    """Returns the plan of a step of the layers that `costs` has, with the parts that it has of each.

    Args:
        forward, backward: of each layer.
        partition: gradients that are reduced on the way; the rest follows the last combine, in one piece.
        exposed: all gradients wait for the end of the backward pass, and go one layer at a time.
    """
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}

    def add(phase: str, layer: int, buckets: list[Task]) -> None:
        of, how = costs.layers[layer], (forward if phase == "forward" else backward)[layer]
        dense = [Task(kind, None, layer, phase) for kind in STAGES[phase] if kind in of.dense_s[phase]]
        # Dense parts before the pipeline, and those that follow it.
        first = sum(STAGES[phase].index(task.kind) < STAGES[phase].index(PIPELINE[0]) for task in dense)
        for task in dense[:first]:
            orders[LINKS.get(task.kind, "compute")].append(task)
        for resource, tasks in how.order(of.chunks[phase], how.degree, phase, layer, buckets).items():
            orders[resource] += tasks
        orders["compute"] += dense[first:]

    layers, cutter = range(len(costs.layers)), BucketCutter(costs.gradient_bytes)
    for layer in layers:
        add("forward", layer, [])
    orders["compute"] += loss_tasks(costs)
    for layer in reversed(layers):
        middle, beside = (0.0, 0.0) if partition is None else (partition.middle[layer], partition.beside[layer])
        add("backward", layer, cutter.cut(middle, layer + 1))
        orders["inter"] += cutter.cut(beside, layer + 1)
    after = {}
    # All that is left of the gradients goes now: layer by layer where nothing is hidden, else in one piece.
    for layer in reversed(layers) if exposed else (0,):
        buckets = cutter.cut(cutter.available(layer), layer)
        orders["inter"] += buckets
        if exposed:
            after.update({bucket: (orders["compute"][-1],) for bucket in buckets})
    orders["compute"] += optimizer_tasks(costs)
    return Plan.from_orders(orders, after)


def idle_slot_plan(
    costs: StepCosts, forward: Sequence[ChunkedPass], backward: Sequence[ChunkedPass], bucket_bytes: int
) -> Plan:
    """Returns the plan of a step whose gradients go in buckets, each as soon as `inter` has nothing else to do."""
    bare = step_plan(costs, forward, backward)
    orders = {on: [t for t in tasks if t.kind != TaskKind.GRADIENT_ALL_REDUCE] for on, tasks in bare.orders.items()}
    # A bucket never reaches over the end of a layer's gradient.
    buckets = gradient_buckets(costs.gradient_bytes, bucket_bytes)
    return fill_idle_slots(orders, costs.seconds(bare), buckets, costs.all_reduce)


class Degrees(NamedTuple):
    """Micro-batches of one layer's pass: of its dense part, and of its pipeline."""

    dense: int
    rows: int


def pass_tasks(costs: StepCosts, layer: int, phase: str, degrees: Degrees, *, weights: bool = False) -> Iterator[Task]:
    """Yields all parts of one layer's pass in so many micro-batches, in the order in which rows go through them.

    `weights`: behind each task comes the W task that is cut off from it (`task.WEIGHT_GRADIENTS`), where it has weight
    gradients.
    """
    chunks, micro = costs.layers[layer].chunks[phase], costs.layers[layer].in_micro_batches()
    for kind in STAGES[phase]:
        if kind == TaskKind.PERMUTE and phase == "forward" and micro.waits:
            yield Task(kind, None, layer, phase)
        elif kind in chunks or kind in micro.dense[phase]:
            apart = WEIGHT_GRADIENTS.get(kind) if weights and kind in micro.weights else None
            for chunk in range(degrees.rows if kind in chunks else degrees.dense):
                yield Task(kind, chunk, layer, phase)
                if apart is not None:
                    yield Task(apart, chunk, layer, phase)


def loss_tasks(costs: StepCosts) -> list[Task]:
    """Returns the loss of all of a batch, which autograd runs between the two plans; none where the step has none."""
    return [] if costs.loss_s is None else [Task(TaskKind.LOSS, None, None, None)]


def optimizer_tasks(costs: StepCosts) -> list[Task]:
    """Returns the optimizer, where the step has one."""
    return [] if costs.optimizer_s is None else [Task(TaskKind.OPTIMIZER, None, None, None)]


def gradient_buckets(gradient_bytes: Sequence[int], bucket_bytes: int | None) -> list[Task]:
    """Returns all-reduces of `bucket_bytes`, a layer's last one smaller (None: one a layer), the last layer's first."""
    return [
        Task(TaskKind.GRADIENT_ALL_REDUCE, number, layer, "backward", min(bucket_bytes or size, size - start))
        for layer, size in reversed(list(enumerate(gradient_bytes)))
        for number, start in enumerate(range(0, size, bucket_bytes or size or 1))
    ]


class BucketCutter:
    """Cuts buckets off the gradients of a stack of layers, given in bytes by layer, last layer first."""

    def __init__(self, gradient_bytes: Sequence[int]) -> None:
        self.start = 0
        self.ends = gradient_ends(gradient_bytes)
        self._cut: dict[int, int] = {}

    def available(self, layer: int) -> int:
        """Returns the bytes that are ready, and not yet cut off, once the backward pass of `layer` has ended."""
        end = self.ends[layer] if layer < len(self.ends) else 0
        return max(0, end - self.start)

    def cut(self, size: float, layer: int) -> list[Task]:
        """Returns the next bucket of about `size` bytes, from what is ready after `layer`, if anything is."""
        ready = self.available(layer)
        size = ready if size >= ready - ALIGNMENT else int(size) // ALIGNMENT * ALIGNMENT
        if size <= 0:
            return []
        self.start += size
        # A bucket belongs to the last layer that it carries bytes of, whose dense part it has to wait for.
        last = max(at for at, end in enumerate(self.ends) if end >= self.start)
        number = self._cut.get(last, 0)
        self._cut[last] = number + 1
        return [Task(TaskKind.GRADIENT_ALL_REDUCE, number, last, "backward", size)]


def pass_of(plan: Plan, layer: int, phase: str) -> Plan:
    """Returns one layer's pass as a plan of more has it: its chunks, and the gradient buckets that run between them."""

    orders = {}
    for resource, tasks in plan.orders.items():
        places = [place for place, task in enumerate(tasks) if _is_chunk(task, layer, phase)]
        between = tasks[places[0] : places[-1] + 1] if places else ()
        orders[resource] = [
            task for task in between if _is_chunk(task, layer, phase) or task.kind == TaskKind.GRADIENT_ALL_REDUCE
        ]
    return Plan.from_orders(orders)


def one_pass(plan: Plan, phase: str) -> Plan:
    """Returns one pass of all layers as a plan of both has it, with its gradient buckets and weight gradients."""

    def own(tasks: Iterable[Task]) -> tuple[Task, ...]:
        return tuple(task for task in tasks if task.phase == phase)

    orders = {resource: own(tasks) for resource, tasks in plan.orders.items()}
    return Plan.from_orders(orders, {task: own(before) for task, before in plan.after.items() if task.phase == phase})


def buckets_after(plan: Plan, layer: int) -> tuple[Task, ...]:
    """Returns the gradient buckets after the last chunk of a layer's backward pass, before those of the next layer."""
    places = [place for place, task in enumerate(plan.inter) if _is_chunk(task, layer, "backward")]
    behind = plan.inter[places[-1] + 1 :] if places else ()
    buckets = takewhile(lambda task: task.kind == TaskKind.GRADIENT_ALL_REDUCE, behind)
    # What waits for this layer's own dense part or an earlier one's, or is told to wait, is not beside anything.
    return tuple(task for task in buckets if task.layer is not None and task.layer > layer and task not in plan.after)


def pass_by_degree(order: Order, kinds: Collection[str], degree: int, phase: str) -> Plan:
    """Returns one layer's pass with that many chunks, in an order of the chunks of its kinds."""
    return Plan.from_orders(order(kinds, degree, phase, 0, ()))


def fused_pass(kind: str, degree: int, phase: str) -> Plan:
    """Returns one layer's pass by a fused operation in that many chunks."""
    chunks = [Task(kind, chunk, 0, phase) for chunk in range(degree)]
    return Plan.from_orders(dict.fromkeys(resources_of(kind), chunks))


def _is_chunk(task: Task, layer: int, phase: str) -> bool:
    return (task.layer, task.phase) == (layer, phase) and task.kind in PIPELINE
