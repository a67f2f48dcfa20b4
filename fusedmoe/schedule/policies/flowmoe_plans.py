"""FlowMoE's plan of a step, and the joint search that starts from it. Both split steps into micro-batches.

FlowMoE has one degree for both passes and one bucket size. `joint_split` improves its best split one part at a time:
degrees per pass, buckets, W tasks, and finally degrees per layer. List scheduling determines the order, so a split
(`StepSplit`) determines its plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import Degrees, gradient_buckets, loss_tasks, optimizer_tasks, pass_tasks
from fusedmoe.schedule.step_costs import StepCosts, resource_work_s
from fusedmoe.schedule.task import PHASES, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.task_orders import ListSchedule, list_plan

#: Numbers of buckets to try for the largest gradient of a layer.
BUCKETS = (1, 2, 4, 8, 16)

#: Maximum number of rounds in `_split_by_layer`.
ROUNDS = 4

# FlowMoE's bucket size without tuning.
_UNTUNED_BYTES = 2**20
# Layers at each end of a stack with individual degrees; minimum relative gain for another round.
_END_LAYERS, _MIN_GAIN = 3, 5e-4
# A list schedule slower than the best by this factor is not improved.
_CUTOFF = 1.05


class StepSplit(NamedTuple):
    """Split of a step into micro-batches and gradient buckets.

    Attributes:
        forward, backward: number of micro-batches in each pass, for all layers or per layer.
        bucket_bytes: bytes of a gradient all-reduce (S_p); None: one bucket per layer.
        weights: weight gradients are separate tasks (W tasks).
    """

    forward: int | tuple[Degrees, ...]
    backward: int | tuple[Degrees, ...]
    bucket_bytes: int | None = None
    weights: bool = False

    @classmethod
    def from_plan(cls, plan: Plan) -> StepSplit:
        """Return the split of a plan made by `micro_schedule`; `bucket_bytes` becomes the largest bucket."""
        counts = Counter((task.kind, task.phase, task.layer) for task in plan.compute)

        def degrees(phase: str) -> int | tuple[Degrees, ...]:
            layers = sorted(layer or 0 for where, layer in plan.degrees if where == phase)
            each = tuple(Degrees(counts[TaskKind.ATTENTION, phase, n], plan.degrees[phase, n]) for n in layers)
            numbers = {number for layer in each for number in layer}
            return numbers.pop() if len(numbers) == 1 else each  # a single number if all are equal

        weights = any(task.kind in WEIGHT_GRADIENTS.values() for task in plan.compute)
        return cls(degrees("forward"), degrees("backward"), plan.largest_bucket, weights)

    def degrees(self, num_layers: int) -> dict[str, tuple[Degrees, ...]]:
        """Return the numbers of chunks of each layer, by phase."""
        return {
            phase: (Degrees(degree, degree),) * num_layers if isinstance(degree, int) else degree
            for phase, degree in zip(PHASES, (self.forward, self.backward), strict=True)
        }

    def with_degrees(self, degrees: Mapping[str, tuple[Degrees, ...]]) -> StepSplit:
        """Return the split with other numbers of chunks: one `Degrees` per layer, by phase."""
        return self._replace(forward=degrees["forward"], backward=degrees["backward"])

    def bound_s(self, costs: StepCosts) -> float:
        """Return a lower bound of the step time in seconds: the work of the busiest resource."""
        work_s = {"compute": (costs.loss_s or 0.0) + (costs.optimizer_s or 0.0), "intra": 0.0, "inter": 0.0}
        known: dict[tuple[int, str, Degrees], dict[str, float]] = {}  # keyed by id: often one object many times
        for phase, degrees in self.degrees(len(costs.layers)).items():
            for layer, number in zip(costs.layers, degrees, strict=True):
                where = (id(layer), phase, number)
                if where not in known:
                    dense = layer.micro_batch_costs().dense[phase].values()
                    known[where] = resource_work_s(layer.chunks[phase], number.rows)
                    known[where]["compute"] += sum(number.dense * part.seconds(number.dense) for part in dense)
                for resource, seconds in known[where].items():
                    work_s[resource] += seconds
        buckets = gradient_buckets(costs.gradient_bytes, self.bucket_bytes)
        work_s["inter"] += sum(costs.all_reduce.seconds(bucket.size or 0) for bucket in buckets)
        return costs.contention.lower_bound_s(**work_s)

    def tasks(self, costs: StepCosts) -> Iterator[Task]:
        """Yield all tasks in a topological order."""
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


def micro_schedule(costs: StepCosts, split: StepSplit, cutoff_s: float = math.inf) -> ListSchedule:
    """Return the list schedule of a step that is split into micro-batches.

    `cutoff_s`: see `ListSchedule`. Raises `ConfigError` for layers that cannot be split (`LayerCosts.micro`).
    """
    tasks = list(split.tasks(costs))
    return ListSchedule(tasks, costs.durations(tasks), cutoff_s=cutoff_s)


def exposed_plan(costs: StepCosts, split: StepSplit) -> Plan:
    """Return the plan of a step in micro-batches whose gradient all-reduces start after the backward pass."""
    late = (TaskKind.GRADIENT_ALL_REDUCE, TaskKind.OPTIMIZER)
    every = list(split.tasks(costs))
    tasks = [task for task in every if task.kind not in late]
    plan = list_plan(tasks, costs.durations(tasks))
    buckets, end = ([task for task in every if task.kind == kind] for kind in late)
    orders = {"compute": [*plan.compute, *end], "intra": plan.intra, "inter": [*plan.inter, *buckets]}
    return Plan.from_orders(orders, {bucket: plan.compute[-1:] for bucket in buckets})


class SplitSearch:
    """Search for the best split. Skips splits whose lower bound exceeds the best time.

    `exposed`: of plans whose gradient all-reduces start after the backward pass (`exposed_plan`).
    """

    def __init__(self, costs: StepCosts, on_split: Callable[[], None] = lambda: None, *, exposed: bool = False) -> None:
        self._costs, self._on_split, self._exposed = costs, on_split, exposed
        self._tried: frozenset[StepSplit] = frozenset()
        self.best_s = math.inf
        self.best: StepSplit
        self.plan: Callable[[], Plan]

    def bucket_bytes(self, buckets: int) -> int:
        """Return the bucket size that cuts the largest layer gradient into `buckets` buckets."""
        return max(1, -(-max(self._costs.gradient_bytes) // buckets))

    def try_all(self, splits: Iterable[StepSplit]) -> None:
        splits = list(splits)  # a generator may use the current best
        least = {split: split.bound_s(self._costs) for split in splits if split not in self._tried}
        # A good early split excludes many others by their bounds.
        for split in sorted(least, key=least.__getitem__):
            if least[split] < self.best_s:
                self._try(split)
            self._on_split()
        for _ in range(len(splits) - len(least)):
            self._on_split()
        self._tried |= least.keys()

    def _try(self, split: StepSplit) -> None:
        make_plan: Callable[[], Plan]
        if self._exposed:
            make_plan = partial(exposed_plan, self._costs, split)
            seconds = makespan(make_plan(), self._costs)
        else:
            schedule = micro_schedule(self._costs, split, self.best_s * _CUTOFF)
            make_plan, seconds = schedule.plan, schedule.makespan_s()
            if seconds < self.best_s:  # contention only adds time, and needs the event loop
                seconds = schedule.makespan_s(self._costs.contention)
        if seconds * (1 + ROUNDING) < self.best_s:
            self.best_s, self.best, self.plan = seconds, split, make_plan


def search_flowmoe_split(costs: StepCosts, degrees: Sequence[int], on_split: Callable[[], None]) -> SplitSearch:
    """Search FlowMoE's split: the best degree of `degrees` for one bucket size, then the best bucket size."""
    search = SplitSearch(costs, on_split)
    search.try_all(StepSplit(degree, degree, search.bucket_bytes(4)) for degree in degrees)
    search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(buckets)) for buckets in BUCKETS)
    return search


def ablation_plans(costs: StepCosts, degrees: Sequence[int], on_split: Callable[[], None]) -> tuple[Plan, Plan]:
    """Return two plans of FlowMoE with attention in micro-batches: gradients at the end, and in untuned buckets."""
    search = SplitSearch(costs, on_split, exposed=True)
    search.try_all(StepSplit(degree, degree) for degree in degrees)
    return search.plan(), micro_schedule(costs, search.best._replace(bucket_bytes=_UNTUNED_BYTES)).plan()


def joint_split(tuned: SplitSearch, costs: StepCosts, degrees: Sequence[int], on_split: Callable[[], None]) -> Plan:
    """Return the plan of FlowMoE's split, improved one part at a time until no change helps."""
    search = copy(tuned)  # keep FlowMoE's result
    search.try_all(search.best._replace(forward=degree, backward=degree, weights=True) for degree in degrees)
    begun = None
    while begun != search.best:
        begun = search.best
        sizes = [search.bucket_bytes(count) for count in BUCKETS]
        search.try_all(
            search.best._replace(backward=backward, bucket_bytes=size, weights=weights)
            for backward, size, weights in product(degrees, sizes, (True, False))
        )
        search.try_all(search.best._replace(forward=degree) for degree in degrees)
    search.try_all([_split_by_layer(search.best, costs, degrees, on_split)])
    return search.plan()


def _split_by_layer(
    best: StepSplit, costs: StepCosts, degrees: Sequence[int], on_split: Callable[[], None]
) -> StepSplit:
    count = len(costs.layers)
    # In deep stacks, inner layers get the degrees of the first end's last layer.
    ends = [*range(count)] if count <= 2 * _END_LAYERS else [*range(_END_LAYERS), *range(count - _END_LAYERS, count)]
    search = SplitSearch(replace(costs, layers=tuple(costs.layers[layer] for layer in ends)))
    search.try_all([best.with_degrees(best.degrees(len(ends)))])
    for _ in range(ROUNDS):
        begun_s = search.best_s
        search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(count)) for count in BUCKETS)
        for phase in reversed(PHASES):
            for layers in [range(len(ends)), *([layer] for layer in range(len(ends)))]:
                search.try_all(_layer_variations(search.best, phase, layers, degrees))
        on_split()
        if search.best_s > begun_s * (1 - _MIN_GAIN):
            break
    places = [min(layer, _END_LAYERS - 1) if layer < count - _END_LAYERS else layer - count for layer in range(count)]
    by_phase = search.best.degrees(len(ends))
    return search.best.with_degrees({phase: tuple(of[place] for place in places) for phase, of in by_phase.items()})


def _layer_variations(
    split: StepSplit, phase: str, layers: Sequence[int], degrees: Sequence[int]
) -> Iterator[StepSplit]:
    """Yield splits with other degrees of some layers, of dense part and pipeline together or separately."""
    now, last = split.degrees(0), len(degrees) - 1

    def neighbour_degrees(degree: int, other: int) -> tuple[int, ...]:
        # Next smaller and larger, double and half, and the other part's degree.
        place = degrees.index(degree)
        beside = degrees[max(0, place - 1)], degrees[min(last, place + 1)]
        return (*beside, *(new if new in degrees else degree for new in (2 * degree, degree // 2, other)))

    for which in range(5):
        for parts in (("dense", "rows"), ("rows",), ("dense",)):
            changed = list(now[phase])
            for layer in layers:
                dense, rows = changed[layer]
                new = {"dense": neighbour_degrees(dense, rows)[which], "rows": neighbour_degrees(rows, dense)[which]}
                changed[layer] = changed[layer]._replace(**{part: new[part] for part in parts})
            yield split.with_degrees({**now, phase: tuple(changed)})
