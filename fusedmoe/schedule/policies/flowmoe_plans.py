"""FlowMoE's plan of a step, and the search that goes on from it: micro-batches through all layers (`StepSplit`).

FlowMoE has one degree for both passes and gradient buckets of one size; `tuned_split` tries some of each. `joint_split`
goes on from its best split and changes one part of it at a time: degrees of each pass, buckets, weight gradients as W
tasks, and at last the degrees of each layer. Every order is found by list scheduling, so that a split alone says what
the plan is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from fusedmoe.schedule.list_schedule import ListSchedule, list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import Degrees, gradient_buckets, loss_tasks, optimizer_tasks, pass_tasks
from fusedmoe.schedule.step_costs import StepCosts, resource_bound_s
from fusedmoe.schedule.task import PHASES, WEIGHT_GRADIENTS, Task, TaskKind

#: Buckets of the largest gradient of a layer that are tried.
BUCKETS = (1, 2, 4, 8, 16)

#: Rounds over the layers at the ends of a stack.
ROUNDS = 4

# The size of FlowMoE's buckets where nothing tunes them.
_UNTUNED_BYTES = 2**20
# Layers at each end of a stack that may have degrees of their own, and what one more round has to gain.
_ENDS, _WORTH = 3, 5e-4
# A list schedule that takes so many times the best split's seconds is not made the best by improving it.
_HOPELESS = 1.05


class StepSplit(NamedTuple):
    """A way to split a step.

    Attributes:
        forward, backward: micro-batches of both passes, of all layers or of each.
        bucket_bytes: bytes of a gradient all-reduce (S_p); None: a bucket for each layer.
        weights: weight gradients are W tasks.
    """

    forward: int | tuple[Degrees, ...]
    backward: int | tuple[Degrees, ...]
    bucket_bytes: int | None = None
    weights: bool = False

    @classmethod
    def from_plan(cls, plan: Plan) -> StepSplit:
        """Returns how a plan of `micro_schedule` is split. Its `bucket_bytes` are those of the largest bucket."""
        counts = Counter((task.kind, task.phase, task.layer) for task in plan.compute)

        def degrees(phase: str) -> int | tuple[Degrees, ...]:
            layers = sorted(layer or 0 for where, layer in plan.degrees if where == phase)
            each = tuple(Degrees(counts[TaskKind.ATTENTION, phase, n], plan.degrees[phase, n]) for n in layers)
            numbers = {number for layer in each for number in layer}
            return numbers.pop() if len(numbers) == 1 else each  # one number where that says it all

        weights = any(task.kind in WEIGHT_GRADIENTS.values() for task in plan.compute)
        return cls(degrees("forward"), degrees("backward"), plan.largest_bucket, weights)

    def degrees(self, layers: int) -> dict[str, tuple[Degrees, ...]]:
        """Returns the degrees of each of so many layers, by phase."""
        return {
            phase: (Degrees(degree, degree),) * layers if isinstance(degree, int) else degree
            for phase, degree in zip(PHASES, (self.forward, self.backward), strict=True)
        }

    def with_degrees(self, degrees: Mapping[str, tuple[Degrees, ...]]) -> StepSplit:
        """Returns the split with these degrees of each layer, by phase."""
        return self._replace(forward=degrees["forward"], backward=degrees["backward"])

    def bound_s(self, costs: StepCosts) -> float:
        """Returns the seconds that no order of a step that is split so beats."""
        buckets = gradient_buckets(costs.gradient_bytes, self.bucket_bytes)
        return resource_bound_s(costs, self.degrees(len(costs.layers)), [bucket.size or 0 for bucket in buckets])

    def tasks(self, costs: StepCosts) -> Iterator[Task]:
        """Yields all tasks of a step that is split so, in an order in which they could run."""
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


def micro_schedule(costs: StepCosts, split: StepSplit, hopeless_s: float = math.inf) -> ListSchedule:
    """Returns the list schedule of a step that is split so: its plan, and its makespan at a fraction of the cost.

    `hopeless_s`: see `ListSchedule`. Raises `ConfigError` for layers that cannot be split (`LayerCosts.micro`).
    """
    tasks = list(split.tasks(costs))
    return ListSchedule(tasks, costs.durations(tasks), hopeless_s=hopeless_s)


def exposed_plan(costs: StepCosts, split: StepSplit) -> Plan:
    """Returns the plan of a step that is split so, where all gradients wait for the end of the backward pass."""
    late = (TaskKind.GRADIENT_ALL_REDUCE, TaskKind.OPTIMIZER)
    every = list(split.tasks(costs))
    tasks = [task for task in every if task.kind not in late]
    plan = list_plan(tasks, costs.durations(tasks))
    buckets, end = ([task for task in every if task.kind == kind] for kind in late)
    orders = {"compute": [*plan.compute, *end], "intra": plan.intra, "inter": [*plan.inter, *buckets]}
    return Plan.from_orders(orders, {bucket: plan.compute[-1:] for bucket in buckets})


#: The seconds of a split step, and a function that makes its plan.
Evaluation = tuple[float, Callable[[], Plan]]


def _listed(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    """Evaluates a split step by list scheduling. Where it is no better than the best, its seconds may be wrong."""
    schedule = micro_schedule(costs, split, best_s * _HOPELESS)
    seconds = schedule.makespan_s()
    # Contention makes nothing shorter, and takes the event loop: a split that is no better without it is not looked at.
    return seconds if seconds >= best_s else schedule.makespan_s(costs.contention), schedule.plan


def _exposed(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    plan = exposed_plan(costs, split)
    return makespan(plan, costs), lambda: plan


class SplitSearch:
    """The best split so far. A split that cannot be better by its bound is not looked at."""

    def __init__(
        self,
        costs: StepCosts,
        evaluate: Callable[[StepCosts, StepSplit, float], Evaluation] = _listed,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._costs, self._evaluate, self._step = costs, evaluate, step
        self._tried: frozenset[StepSplit] = frozenset()
        self.best_s = math.inf
        self.best: StepSplit
        self.plan: Callable[[], Plan]

    def bucket_bytes(self, buckets: int) -> int:
        """Returns the bytes of a bucket, where the largest gradient of a layer goes in so many."""
        return max(1, -(-max(self._costs.gradient_bytes) // buckets))

    def try_all(self, splits: Iterable[StepSplit]) -> None:
        """Evaluates what may be better than the best, the least bound first."""
        splits = list(splits)  # as the best one was when the search began
        least = {split: split.bound_s(self._costs) for split in splits if split not in self._tried}
        # The most promising first: a good one soon makes the bounds of many others too high.
        for split in sorted(least, key=least.__getitem__):
            if least[split] < self.best_s:
                seconds, plan = self._evaluate(self._costs, split, self.best_s)
                if seconds * (1 + ROUNDING) < self.best_s:
                    self.best_s, self.best, self.plan = seconds, split, plan
            self._step()
        for _ in range(len(splits) - len(least)):
            self._step()
        self._tried |= least.keys()


def tuned_split(costs: StepCosts, degrees: Sequence[int], step: Callable[[], None]) -> SplitSearch:
    """Returns the search of FlowMoE's split: the best degree for buckets of one size, then the best size.

    `degrees`: numbers of micro-batches that may be tried. `step`: called after each split.
    """
    search = SplitSearch(costs, step=step)
    search.try_all(StepSplit(degree, degree, search.bucket_bytes(4)) for degree in degrees)
    search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(buckets)) for buckets in BUCKETS)
    return search


def exposed_by_part(costs: StepCosts, degrees: Sequence[int], step: Callable[[], None]) -> tuple[Plan, Plan]:
    """Returns FlowMoE's plans with attention in micro-batches: all gradients at the end, and untuned buckets."""
    search = SplitSearch(costs, _exposed, step)
    search.try_all(StepSplit(degree, degree) for degree in degrees)
    return search.plan(), micro_schedule(costs, search.best._replace(bucket_bytes=_UNTUNED_BYTES)).plan()


def joint_split(tuned: SplitSearch, costs: StepCosts, degrees: Sequence[int], step: Callable[[], None]) -> Plan:
    """Returns the plan of FlowMoE's split with each part of it changed for as long as that is better."""
    search = copy(tuned)  # it goes on from there, and leaves FlowMoE's as it is
    search.try_all(search.best._replace(forward=degree, backward=degree, weights=True) for degree in degrees)
    begun = None
    while begun != search.best:  # until no such change is better
        begun = search.best
        sizes = [search.bucket_bytes(count) for count in BUCKETS]
        search.try_all(
            search.best._replace(backward=backward, bucket_bytes=size, weights=weights)
            for backward, size, weights in product(degrees, sizes, (True, False))
        )
        search.try_all(search.best._replace(forward=degree) for degree in degrees)
    search.try_all([_split_by_layer(search.best, costs, degrees, step)])
    return search.plan()


def _split_by_layer(best: StepSplit, costs: StepCosts, degrees: Sequence[int], step: Callable[[], None]) -> StepSplit:
    """Returns a split with the degrees of each layer's dense part and pipeline changed while that is better."""
    count = len(costs.layers)
    # Of many layers only those at the ends are searched, as if no others lay between them; the inner ones then have the
    # degrees of their neighbour at the first end.
    ends = [*range(count)] if count <= 2 * _ENDS else [*range(_ENDS), *range(count - _ENDS, count)]
    search = SplitSearch(replace(costs, layers=tuple(costs.layers[layer] for layer in ends)))
    search.try_all([best.with_degrees(best.degrees(len(ends)))])
    for _ in range(ROUNDS):
        begun_s = search.best_s
        search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(count)) for count in BUCKETS)
        for phase in reversed(PHASES):
            for layers in [range(len(ends)), *([layer] for layer in range(len(ends)))]:
                search.try_all(_changed(search.best, phase, layers, degrees))
        step()
        if search.best_s > begun_s * (1 - _WORTH):
            break
    places = [min(layer, _ENDS - 1) if layer < count - _ENDS else layer - count for layer in range(count)]
    by_phase = search.best.degrees(len(ends))
    return search.best.with_degrees({phase: tuple(of[place] for place in places) for phase, of in by_phase.items()})


def _changed(split: StepSplit, phase: str, layers: Sequence[int], degrees: Sequence[int]) -> Iterator[StepSplit]:
    """Yields splits with some layers' degrees changed, of the dense part and the pipeline together and of either."""
    now, last = split.degrees(0), len(degrees) - 1

    def near(degree: int, other: int) -> tuple[int, ...]:
        """Returns the next smaller and larger degree, twice and half as many, and the one of the other part."""
        place = degrees.index(degree)
        beside = degrees[max(0, place - 1)], degrees[min(last, place + 1)]
        return (*beside, *(new if new in degrees else degree for new in (2 * degree, degree // 2, other)))

    for which in range(5):
        for parts in (("dense", "rows"), ("rows",), ("dense",)):
            changed = list(now[phase])
            for layer in layers:
                dense, rows = changed[layer]
                new = {"dense": near(dense, rows)[which], "rows": near(rows, dense)[which]}
                changed[layer] = changed[layer]._replace(**{part: new[part] for part in parts})
            yield split.with_degrees({**now, phase: tuple(changed)})
