"""Plans of a training step: layers forward, then backward, with gradient all-reduces between them.

With micro-batches (FlowMoE), attention is chunked too. The backward pass may be split into input gradients and W tasks
for weight gradients (Lancet); later passes wait for input gradients only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.passes import GradientPartition, TaskOrder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import StepCosts, gradient_ends
from fusedmoe.schedule.task import LINKS, PIPELINE, RESOURCES, STAGES, WEIGHT_GRADIENTS, Task, TaskKind, resources_of
from fusedmoe.schedule.task_orders import fill_idle_slots

#: Buckets start and end at multiples of this many bytes, or at the end of a layer's gradient.
ALIGNMENT = 256


class ChunkedPass(NamedTuple):
    """Task order and number of chunks of one layer's pass."""

    order: TaskOrder
    degree: int


def step_plan(
    costs: StepCosts,
    forward: Sequence[ChunkedPass],
    backward: Sequence[ChunkedPass],
    partition: GradientPartition | None = None,
    *,
    exposed: bool = False,
) -> Plan:
    """Return the plan of a step of all layers and parts in `costs`.

    Args:
        forward, backward: the pass of each layer.
        partition: gradient bytes to reduce during and after each backward pass. The rest is reduced in one piece after
            the last combine.
        exposed: reduce all gradients after the backward pass, layer by layer, so that no computation hides it.
    Raises:
        ConfigError: not one `ChunkedPass` per layer and phase.
    """
    for phase, passes in (("forward", forward), ("backward", backward)):
        if len(passes) != len(costs.layers):
            raise ConfigError(
                f"step_plan: {len(passes)} {phase} passes for {len(costs.layers)} layers; give one for each"
            )
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}

    def add(phase: str, layer: int, buckets: list[Task]) -> None:
        of, how = costs.layers[layer], (forward if phase == "forward" else backward)[layer]
        dense = [Task(kind, None, layer, phase) for kind in STAGES[phase] if kind in of.dense_s[phase]]
        # Dense parts before and after the pipeline.
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
        middle, beside = (
            (0.0, 0.0) if partition is None else (partition.pipeline_bytes[layer], partition.dense_bytes[layer])
        )
        add("backward", layer, cutter.cut(middle, layer + 1))
        orders["inter"] += cutter.cut(beside, layer + 1)
    after = {}
    for layer in reversed(layers) if exposed else (0,):
        buckets = cutter.cut(cutter.available_bytes(layer), layer)
        orders["inter"] += buckets
        if exposed:
            after.update({bucket: (orders["compute"][-1],) for bucket in buckets})
    orders["compute"] += optimizer_tasks(costs)
    return Plan.from_orders(orders, after)


def idle_slot_plan(
    costs: StepCosts, forward: Sequence[ChunkedPass], backward: Sequence[ChunkedPass], bucket_bytes: int
) -> Plan:
    """Return the plan of a step that reduces gradient buckets whenever `inter` is idle."""
    bare = step_plan(costs, forward, backward)
    orders = {on: [t for t in tasks if t.kind != TaskKind.GRADIENT_ALL_REDUCE] for on, tasks in bare.orders.items()}
    buckets = gradient_buckets(costs.gradient_bytes, bucket_bytes)
    return fill_idle_slots(orders, costs.seconds(bare), buckets, costs.all_reduce)


class Degrees(NamedTuple):
    """Numbers of micro-batches of the dense part and of the pipeline of one layer's pass."""

    dense: int
    rows: int


def pass_tasks(costs: StepCosts, layer: int, phase: str, degrees: Degrees, *, weights: bool = False) -> Iterator[Task]:
    """Yield all tasks of one layer's pass in micro-batches, in the order of `STAGES`.

    `weights`: yield W tasks (`task.WEIGHT_GRADIENTS`).
    """
    chunks, micro = costs.layers[layer].chunks[phase], costs.layers[layer].micro_batch_costs()
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
    return [] if costs.loss_s is None else [Task(TaskKind.LOSS, None, None, None)]


def optimizer_tasks(costs: StepCosts) -> list[Task]:
    return [] if costs.optimizer_s is None else [Task(TaskKind.OPTIMIZER, None, None, None)]


def gradient_buckets(gradient_bytes: Sequence[int], bucket_bytes: int | None) -> list[Task]:
    """Return all-reduces of at most `bucket_bytes` (None: one per layer), last layer first.

    No bucket crosses a layer's end.
    """
    return [
        Task(TaskKind.GRADIENT_ALL_REDUCE, number, layer, "backward", min(bucket_bytes or size, size - start))
        for layer, size in reversed(list(enumerate(gradient_bytes)))
        for number, start in enumerate(range(0, size, bucket_bytes or size or 1))
    ]


class BucketCutter:
    """Cut buckets off the gradients of a stack of layers (bytes by layer), last layer first."""

    def __init__(self, gradient_bytes: Sequence[int]) -> None:
        self.start = 0
        self.ends = gradient_ends(gradient_bytes)
        self._num_buckets_by_layer: dict[int, int] = {}

    def available_bytes(self, layer: int) -> int:
        """Return the bytes that are complete after the backward pass of `layer` and not yet in a bucket."""
        end = self.ends[layer] if layer < len(self.ends) else 0
        return max(0, end - self.start)

    def cut(self, size: float, layer: int) -> list[Task]:
        """Return the next bucket of about `size` bytes that are complete after `layer`; empty if there are none."""
        ready = self.available_bytes(layer)
        size = ready if size >= ready - ALIGNMENT else int(size) // ALIGNMENT * ALIGNMENT
        if size <= 0:
            return []
        self.start += size
        last = max(at for at, end in enumerate(self.ends) if end >= self.start)
        number = self._num_buckets_by_layer.get(last, 0)
        self._num_buckets_by_layer[last] = number + 1
        return [Task(TaskKind.GRADIENT_ALL_REDUCE, number, last, "backward", size)]


def extract_layer_pass(plan: Plan, layer: int, phase: str) -> Plan:
    """Return one layer's pass of a plan: its chunks, and the gradient buckets between them."""
    orders = {}
    for resource, tasks in plan.orders.items():
        places = [place for place, task in enumerate(tasks) if is_chunk(task, layer, phase)]
        between = tasks[places[0] : places[-1] + 1] if places else ()
        orders[resource] = [
            task for task in between if is_chunk(task, layer, phase) or task.kind == TaskKind.GRADIENT_ALL_REDUCE
        ]
    return Plan.from_orders(orders)


def extract_phase(plan: Plan, phase: str) -> Plan:
    """Return one pass of all layers, with its gradient buckets and weight gradients."""

    def own(tasks: Iterable[Task]) -> tuple[Task, ...]:
        return tuple(task for task in tasks if task.phase == phase)

    orders = {resource: own(tasks) for resource, tasks in plan.orders.items()}
    return Plan.from_orders(orders, {task: own(before) for task, before in plan.after.items() if task.phase == phase})


def buckets_after(plan: Plan, layer: int) -> tuple[Task, ...]:
    """Return the gradient buckets between a layer's last backward chunk and the next layer's first."""
    places = [place for place, task in enumerate(plan.inter) if is_chunk(task, layer, "backward")]
    behind = plan.inter[places[-1] + 1 :] if places else ()
    buckets = takewhile(lambda task: task.kind == TaskKind.GRADIENT_ALL_REDUCE, behind)
    # Buckets with an `after` entry, or that wait for the dense part of this or an earlier layer, are not overlapped.
    return tuple(task for task in buckets if task.layer is not None and task.layer > layer and task not in plan.after)


def pass_by_degree(order: TaskOrder, kinds: Collection[str], degree: int, phase: str) -> Plan:
    return Plan.from_orders(order(kinds, degree, phase, 0, ()))


def fused_pass(kind: str, degree: int, phase: str) -> Plan:
    chunks = [Task(kind, chunk, 0, phase) for chunk in range(degree)]
    return Plan.from_orders(dict.fromkeys(resources_of(kind), chunks))


def is_chunk(task: Task, layer: int, phase: str) -> bool:
    return (task.layer, task.phase) == (layer, phase) and task.kind in PIPELINE
