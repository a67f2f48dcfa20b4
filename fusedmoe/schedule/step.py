"""The tasks of a training step: layers forward, then backward, with the gradient all-reduces between them.

In orders by resource (`step_plan`), one after the other in micro-batches (`StepSplit.tasks`), and of one layer's pass
by itself, by number of chunks or as a plan of more has it.

In micro-batches attention is split as well, and chunks go on from layer to layer (FlowMoE): chunk i of a layer waits
for chunk i of the layer before and for no other. Each part of each layer may be in chunks of its own. The backward pass
may be split, too, into gradients of inputs and W tasks for those of weights (Lancet): what waits for a pass waits for
the gradients of its input only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from fusedmoe.schedule.list_schedule import ListSchedule, fill_idle_slots, list_plan
from fusedmoe.schedule.passes import Order, Partition, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step_costs import StepCosts, gradient_ends, resource_bound_s
from fusedmoe.schedule.task import LINKS, PIPELINE, STAGES, WEIGHT_GRADIENTS, Task, resources_of, weight_gradient
from fusedmoe.schedule.timeline import PHASES, RESOURCES

#: Policies whose links inside the node and between nodes work at the same time; the others have one queue.
THREE_QUEUES = ("fsmoe", "fused", "joint")

#: Buckets start and end at multiples of this many bytes, or at the end of a layer's gradient.
ALIGNMENT = 256

_GRADIENT = "gradient-all-reduce"

# A list schedule that takes so many times the best split's seconds is not made the best by improving it.
_HOPELESS = 1.05


class ChunkedPass(NamedTuple):
    """How one layer's chunks go through one pass."""

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
    """The plan of a step of the layers that `costs` has, with the parts that it has of each.

    `forward`, `backward`: one for each layer. `partition`: gradients that are reduced on the way; what is left over
    follows the last combine, in one piece. `exposed`: all gradients wait for the end of the backward pass, and go one
    layer at a time.
    """
    orders: dict[str, list[Task]] = {resource: [] for resource in RESOURCES}

    def add(phase: str, layer: int, buckets: list[Task]) -> None:
        of, how = costs.layers[layer], (forward if phase == "forward" else backward)[layer]
        dense = [Task(kind, None, layer, phase) for kind in STAGES[phase] if kind in of.dense_s[phase]]
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
    """The plan of a step whose gradients go in buckets, each as soon as `inter` has nothing else to do.

    A bucket never reaches over the end of a layer's gradient.
    """
    bare = step_plan(costs, forward, backward)
    orders = {resource: [task for task in bare.on(resource) if task.kind != _GRADIENT] for resource in RESOURCES}
    buckets = gradient_buckets(costs.gradient_bytes, bucket_bytes)
    return fill_idle_slots(orders, costs.seconds(bare), buckets, costs.all_reduce)


class Degrees(NamedTuple):
    """Micro-batches of one layer's pass: of its dense part, and of its pipeline."""

    dense: int
    rows: int


def pass_tasks(costs: StepCosts, layer: int, phase: str, degrees: Degrees, *, weights: bool = False) -> Iterator[Task]:
    """All parts of one layer's pass in so many micro-batches, in the order in which rows go through them.

    `weights`: behind each task comes the W task that is cut off from it (`task.WEIGHT_GRADIENTS`).
    """
    chunks, micro = costs.layers[layer].chunks[phase], costs.layers[layer].in_micro_batches()
    for kind in STAGES[phase]:
        if kind == "permute" and phase == "forward" and micro.waits:
            yield Task(kind, None, layer, phase)
        elif kind in chunks or kind in micro.dense[phase]:
            apart = weight_gradient(kind) if weights else None
            for chunk in range(degrees.rows if kind in chunks else degrees.dense):
                yield Task(kind, chunk, layer, phase)
                if apart is not None:
                    yield Task(apart, chunk, layer, phase)


def loss_tasks(costs: StepCosts) -> list[Task]:
    """The loss of all of a batch, which autograd runs between the two plans; none where the step has none."""
    return [] if costs.loss_s is None else [Task("loss", None, None, None)]


def optimizer_tasks(costs: StepCosts) -> list[Task]:
    """The optimizer, where the step has one."""
    return [] if costs.optimizer_s is None else [Task("optimizer", None, None, None)]


def gradient_buckets(gradient_bytes: Sequence[int], bucket_bytes: int | None) -> list[Task]:
    """All-reduces of `bucket_bytes`, a layer's last one smaller (None: one a layer), in back-propagation's order."""
    return [
        Task(_GRADIENT, number, layer, "backward", min(bucket_bytes or size, size - start))
        for layer, size in reversed(list(enumerate(gradient_bytes)))
        for number, start in enumerate(range(0, size, bucket_bytes or size or 1))
    ]


class BucketCutter:
    """Cuts buckets off the gradients of a stack of layers, last layer first.

    `gradient_bytes[l]`: of layer l.
    """

    def __init__(self, gradient_bytes: Sequence[int]) -> None:
        self.start = 0
        self.ends = gradient_ends(gradient_bytes)
        self._cut: dict[int, int] = {}

    def available(self, layer: int) -> int:
        """Bytes that are ready, and not yet cut off, once the backward pass of `layer` has ended."""
        end = self.ends[layer] if layer < len(self.ends) else 0
        return max(0, end - self.start)

    def cut(self, size: float, layer: int) -> list[Task]:
        """The next bucket of about `size` bytes, from what is ready after `layer`; none where that is nothing."""
        ready = self.available(layer)
        size = ready if size >= ready - ALIGNMENT else int(size) // ALIGNMENT * ALIGNMENT
        if size <= 0:
            return []
        self.start += size
        last = max(at for at, end in enumerate(self.ends) if end >= self.start)
        number = self._cut.get(last, 0)
        self._cut[last] = number + 1
        return [Task(_GRADIENT, number, last, "backward", size)]


def pass_of(plan: Plan, layer: int, phase: str) -> Plan:
    """One layer's pass as a plan of more has it: its chunks, and the gradient buckets that run between them."""

    def own(task: Task) -> bool:
        return _is_chunk(task, layer, phase)

    orders = {}
    for resource in RESOURCES:
        tasks = plan.on(resource)
        places = [place for place, task in enumerate(tasks) if own(task)]
        between = tasks[places[0] : places[-1] + 1] if places else ()
        orders[resource] = [task for task in between if own(task) or task.kind == _GRADIENT]
    return Plan.from_orders(orders)


def one_pass(plan: Plan, phase: str) -> Plan:
    """One pass of all layers as a plan of both has it, with its gradient buckets and weight gradients."""
    orders = {resource: [task for task in plan.on(resource) if task.phase == phase] for resource in RESOURCES}
    after = {
        task: tuple(one for one in before if one.phase == phase)
        for task, before in plan.after.items()
        if task.phase == phase
    }
    return Plan.from_orders(orders, after)


def buckets_after(plan: Plan, layer: int) -> tuple[Task, ...]:
    """The gradient buckets after the last chunk of a layer's backward pass, before those of the next layer."""
    places = [place for place, task in enumerate(plan.inter) if _is_chunk(task, layer, "backward")]
    found: list[Task] = []
    for task in plan.inter[places[-1] + 1 :] if places else ():
        if task.kind != _GRADIENT:
            break
        # What waits for this layer's own dense part or an earlier one's, or is told to wait, is not beside anything.
        if task.layer is not None and task.layer > layer and task not in plan.after:
            found.append(task)
    return tuple(found)


def pass_by_degree(policy: str, kinds: Collection[str], degree: int, phase: str) -> Plan:
    """One layer's pass with that many chunks, in the order that a policy has for chunks.

    `kinds`: those of the layer, of which its parts count.
    """
    order = three_queues if policy in THREE_QUEUES else one_queue
    return Plan.from_orders(order(kinds, degree, phase))


def fused_pass(kind: str, degree: int, phase: str) -> Plan:
    """One layer's pass by a fused operation in that many chunks."""
    chunks = [Task(kind, chunk, 0, phase) for chunk in range(degree)]
    return Plan.from_orders(dict.fromkeys(resources_of(kind), chunks))


def _is_chunk(task: Task, layer: int, phase: str) -> bool:
    return (task.layer, task.phase) == (layer, phase) and task.kind in PIPELINE


class StepSplit(NamedTuple):
    """How a step is split.

    `forward`, `backward`: micro-batches of both passes, of all layers or of each. `bucket_bytes`: of a gradient
    all-reduce (S_p); None: a bucket for each layer. `weights`: weight gradients are W tasks.
    """

    forward: int | tuple[Degrees, ...]
    backward: int | tuple[Degrees, ...]
    bucket_bytes: int | None = None
    weights: bool = False

    @classmethod
    def from_plan(cls, plan: Plan) -> StepSplit:
        """How a plan of `micro_schedule` is split. Its `bucket_bytes` are those of the largest bucket there is."""
        counts = Counter((task.kind, task.phase, task.layer) for task in plan.compute)
        forward, backward = (
            tuple(
                Degrees(counts["attention", phase, layer], plan.degrees[phase, layer])
                for layer in sorted(layer or 0 for there, layer in plan.degrees if there == phase)
            )
            for phase in PHASES
        )
        bucket_bytes = max((task.size or 0 for task in plan.inter if task.kind == "gradient-all-reduce"), default=None)
        weights = any(task.kind in WEIGHT_GRADIENTS.values() for task in plan.compute)
        return cls(_in_short(forward), _in_short(backward), bucket_bytes, weights)

    def degrees(self, layers: int) -> dict[str, tuple[Degrees, ...]]:
        """By phase, of each of so many layers."""
        return {
            phase: (Degrees(of, of),) * layers if isinstance(of, int) else of
            for phase, of in zip(PHASES, (self.forward, self.backward), strict=True)
        }

    def with_degrees(self, degrees: Mapping[str, tuple[Degrees, ...]]) -> StepSplit:
        """The same with these, by phase, of each layer."""
        return self._replace(forward=degrees["forward"], backward=degrees["backward"])

    def bound_s(self, costs: StepCosts) -> float:
        """Seconds that no order of a step that is split so beats."""
        buckets = gradient_buckets(costs.gradient_bytes, self.bucket_bytes)
        return resource_bound_s(costs, self.degrees(len(costs.layers)), [bucket.size or 0 for bucket in buckets])

    def tasks(self, costs: StepCosts) -> Iterator[Task]:
        """All tasks of a step that is split so, in an order in which they could run.

        Raises `ConfigError` for layers that cannot be (`LayerCosts.micro`).
        """
        forward, backward = self.degrees(len(costs.layers)).values()
        for layer, degrees in enumerate(forward):
            yield from pass_tasks(costs, layer, "forward", degrees)
        yield from loss_tasks(costs)
        buckets: dict[int, list[Task]] = {}
        for bucket in gradient_buckets(costs.gradient_bytes, self.bucket_bytes):
            buckets.setdefault(bucket.layer or 0, []).append(bucket)
        for layer, degrees in reversed(list(enumerate(backward))):
            yield from pass_tasks(costs, layer, "backward", degrees, weights=self.weights)
            yield from buckets.get(layer, ())
        yield from optimizer_tasks(costs)


def _in_short(degrees: tuple[Degrees, ...]) -> int | tuple[Degrees, ...]:
    """One number where that is all there is to say."""
    found = {one for of in degrees for one in of}
    return found.pop() if len(found) == 1 else degrees


def micro_schedule(costs: StepCosts, split: StepSplit, hopeless_s: float = math.inf) -> ListSchedule:
    """A step that is split so, every order by list scheduling: its plan, and its makespan at a fraction of the cost.

    `hopeless_s`: see `ListSchedule`.

    Raises:
        ConfigError: layers that cannot be split (`LayerCosts.micro`).
    """
    tasks = list(split.tasks(costs))
    return ListSchedule(tasks, costs.durations(tasks), hopeless_s=hopeless_s)


def exposed_plan(costs: StepCosts, split: StepSplit) -> Plan:
    """The plan of a step that is split so, where all gradients wait for the end of the backward pass.

    Raises:
        ConfigError: layers that cannot be split.
    """
    late = ("gradient-all-reduce", "optimizer")
    found = list(split.tasks(costs))
    tasks = [task for task in found if task.kind not in late]
    plan = list_plan(tasks, costs.durations(tasks))
    buckets, end = ([task for task in found if task.kind == kind] for kind in late)
    orders = {"compute": [*plan.compute, *end], "intra": plan.intra, "inter": [*plan.inter, *buckets]}
    return Plan.from_orders(orders, {bucket: plan.compute[-1:] for bucket in buckets})


#: The seconds of a split step, and what makes its plan.
Evaluation = tuple[float, Callable[[], Plan]]


def in_micro_batches(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    """A split step by list scheduling. Where it is no better than the best, its seconds may be wrong."""
    schedule = micro_schedule(costs, split, best_s * _HOPELESS)
    seconds = schedule.makespan_s()  # contention makes nothing shorter
    return seconds if seconds >= best_s else schedule.makespan_s(costs.contention), schedule.plan


def with_exposed_gradients(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    plan = exposed_plan(costs, split)
    return makespan(plan, costs), lambda: plan


class SplitSearch:
    """The best split so far. What cannot be better by its bound is not looked at."""

    def __init__(
        self, costs: StepCosts, evaluate: Callable[[StepCosts, StepSplit, float], Evaluation], step: Callable[[], None]
    ) -> None:
        self._costs, self._evaluate, self._step = costs, evaluate, step
        self._tried: frozenset[StepSplit] = frozenset()
        self._best_s = math.inf
        self.best: StepSplit
        self.plan: Callable[[], Plan]

    @property
    def best_s(self) -> float:
        return self._best_s

    def copy(self) -> SplitSearch:
        """A search that starts from here, apart from this one."""
        return copy(self)

    def bucket_bytes(self, buckets: int) -> int:
        """Bytes of a bucket, where the largest gradient of a layer goes in so many."""
        return max(1, -(-max(self._costs.gradient_bytes) // buckets))

    def try_all(self, splits: Iterable[StepSplit]) -> None:
        splits = list(splits)  # as the best one was when the search began
        least = {split: split.bound_s(self._costs) for split in splits if split not in self._tried}
        for split in sorted(least, key=least.__getitem__):
            if least[split] < self._best_s:
                seconds, plan = self._evaluate(self._costs, split, self._best_s)
                if seconds * (1 + ROUNDING) < self._best_s:
                    self._best_s, self.best, self.plan = seconds, split, plan
            self._step()
        for _ in range(len(splits) - len(least)):
            self._step()
        self._tried |= least.keys()
