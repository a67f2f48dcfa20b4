"""Policies: the published systems, and the one that takes the best of them, as functions from costs to a plan.

    plan = POLICIES["fsmoe"].plan(costs)

A policy is pure: the same costs give the same plan, on every rank. All of them order the same tasks; they differ in
which run at the same time, in how many chunks, and in where the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from fusedmoe.schedule.lancet import PARTS, lancet_plan
from fusedmoe.schedule.passes import (
    Order,
    Partition,
    PassOption,
    alternating,
    bucket_s,
    choose_degree,
    one_queue,
    one_queue_s,
    pass_options,
    pass_s,
    search,
    three_queues,
)
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import (
    ChunkedPass,
    SplitSearch,
    StepSplit,
    idle_slot_plan,
    in_micro_batches,
    micro_schedule,
    step_plan,
    with_exposed_gradients,
)
from fusedmoe.schedule.step_costs import (
    MAX_DEGREE,
    LayerCosts,
    StageTime,
    StepCosts,
    chunk_times,
)
from fusedmoe.schedule.timeline import PHASES

#: The degrees that Tutel tries.
TUTEL_DEGREES = (1, 2, 4, 8)

#: The size of Lina's gradient buckets.
LINA_BYTES = 30 * 10**6

# Micro-batches that are tried where a batch says nothing of its samples.
_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)
# Buckets of the largest gradient of a layer, and what FlowMoE's are where nothing tunes them.
_BUCKETS, _UNTUNED_BYTES = (1, 2, 4, 8, 16), 2**20

# Layers at each end of a stack that may have degrees of their own; rounds over them, and what one more has to gain.
_ENDS, _ROUNDS, _WORTH = 3, 4, 5e-4

_ORDERS = (three_queues, alternating, one_queue)


def sequential(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """One chunk, one thing after the other; every layer's gradient at the end (DeepSpeed-MoE)."""
    one = [ChunkedPass(one_queue, 1)] * len(costs.layers)
    return step_plan(costs, one, one, exposed=True)


def tutel(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """One communication queue; the better one of Tutel's degrees, for both passes; gradients at the end."""
    degrees = [degree for degree in TUTEL_DEGREES if degree <= limit]
    both = [ChunkedPass(one_queue, min(degrees, key=lambda r: _both_passes_s(layer, r))) for layer in costs.layers]
    return step_plan(costs, both, both, exposed=True)


def pipemoe(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """As Tutel; one degree for both passes, the best one by a model of all-to-all and experts (PipeMoE)."""
    both = _pipemoe_passes(costs, limit)
    return step_plan(costs, both, both, exposed=True)


def tutel_improved(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """As PipeMoE; each layer's gradient is reduced beside the dense part of the layer that follows backward."""
    both = _pipemoe_passes(costs, limit)
    none = (0.0,) * len(costs.layers)
    return step_plan(costs, both, both, Partition(none, (*map(float, costs.gradient_bytes[1:]), 0.0)))


def lina(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """As PipeMoE; gradients in buckets of 30 MB, whenever the communication queue would be idle (PipeMoE + Lina)."""
    both = _pipemoe_passes(costs, limit)
    return idle_slot_plan(costs, both, both, LINA_BYTES)


def fsmoe_no_iio(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """FSMoE with one communication queue: own degrees forward and backward, gradients partitioned."""
    return _fsmoe(costs, [one_queue], limit)


def fsmoe(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """Links in a node and between nodes at once, own degrees for both passes, gradients partitioned."""
    return _fsmoe(costs, [three_queues], limit)


def any_order(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """As FSMoE, with the best of all orders for each layer and pass."""
    return _fsmoe(costs, _ORDERS, limit)


def flowmoe(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Micro-batches through all layers, one degree for both passes; gradients in buckets below all-to-all (FlowMoE)."""
    return PlanSearch(costs, limit, samples).flowmoe


def lancet(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Ranges of layers in micro-batches forward; weight gradients beside communication backward (Lancet)."""
    return PlanSearch(costs, limit, samples).lancet


def joint(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """The best in simulation of all policies, orders, degrees, gradient buckets and weight gradients."""
    return PlanSearch(costs, limit, samples).joint


def ablation(costs: StepCosts, limit: int = MAX_DEGREE) -> dict[str, Plan]:
    """FlowMoE part by part (Table 5), each with all before it: pipelined experts, attention in micro-batches as well,
    all-reduces in buckets of 1 MiB, buckets of the best size."""
    return PlanSearch(costs, limit).ablation


def best_of(plans: Sequence[Plan], costs: StepCosts) -> Plan:
    """The shortest in simulation; of those that are equally short the one with the fewest tasks: what costs do not know
    of, each task has some of."""
    seconds = [makespan(plan, costs) for plan in plans]
    enough = min(seconds) * (1 + ROUNDING)
    return min((plan for plan, took in zip(plans, seconds, strict=True) if took <= enough), key=len)


@dataclass(frozen=True)
class Policy:
    """`plan(costs, limit)`: the plan of a training step, with degrees up to `limit`.

    `by_layer`: it plans layers whose pipelines alone are in chunks. `whole`: it lets micro-batches go through whole
    layers, where they can (`StepCosts.can_split`), and then takes `samples` as well (see `PlanSearch`). `own`: it is
    the user's.
    """

    name: str
    plan: Callable[..., Plan] = field(repr=False)  # the address of a function is another on every rank
    description: str
    by_layer: bool
    whole: bool
    own: bool = False


def _described(*functions: Callable[..., Plan], by_layer: bool = False, whole: bool = False) -> dict[str, Policy]:
    return {
        f.__name__: Policy(f.__name__, f, (f.__doc__ or "").strip().rstrip("."), by_layer, whole) for f in functions
    }


#: Every policy by its name; `register_policy` adds to them.
POLICIES = {
    **_described(sequential, tutel, pipemoe, tutel_improved, lina, fsmoe_no_iio, fsmoe, by_layer=True),
    **_described(flowmoe, lancet, whole=True),
    **_described(joint, by_layer=True, whole=True),
}

#: The names of those for layers whose pipelines alone are in chunks, and of those for whole layers in micro-batches,
#: without those that are registered.
LAYER_POLICIES = tuple(name for name, policy in POLICIES.items() if policy.by_layer)
WHOLE_POLICIES = tuple(name for name, policy in POLICIES.items() if policy.whole)


def layer_policies() -> tuple[str, ...]:
    """The names of all policies for layers whose pipelines alone are in chunks, those that are registered last."""
    return tuple(name for name, policy in POLICIES.items() if policy.by_layer)


class PlanSearch:
    """The plans of one step by all policies, each made when it is first asked for: what they share is searched once.

    Args:
        limit: the most chunks, and the most micro-batches.
        samples: of a batch; then micro-batches have equally many. None: any number of micro-batches.
        progress: told how many parts of the search of `joint` are done, of how many; the others' are among them.
    Raises:
        ConfigError: FlowMoE, Lancet and the ablation for layers that cannot be split.
    """

    def __init__(
        self,
        costs: StepCosts,
        limit: int = MAX_DEGREE,
        samples: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._costs, self._limit, self._progress = costs, limit, progress
        self._degrees: Sequence[int] = [degree for degree in _DEGREES if degree <= limit]
        if samples is not None:
            self._degrees = [degree for degree in range(1, limit + 1) if samples % degree == 0]
        self._made: dict[str, Plan] = {}
        # Splits that FlowMoE tries, those that `joint` adds in two rounds, the ablation's, and policies.
        degrees, buckets = len(self._degrees), len(_BUCKETS)
        self._total = (degrees + buckets) + degrees + 2 * (2 * degrees * buckets + degrees) + (degrees + 1)
        self._total += len(layer_policies()) + 2 + _ROUNDS
        self._done = 0

    def plan(self, name: str) -> Plan:
        """The plan by a policy of `POLICIES`."""
        if name in WHOLE_POLICIES:
            found: Plan = getattr(self, name)
            return found
        if name not in self._made:
            self._made[name] = POLICIES[name].plan(self._costs, self._limit)
            self._step()
        return self._made[name]

    @cached_property
    def flowmoe(self) -> Plan:
        return self._tuned.plan()

    @cached_property
    def lancet(self) -> Plan:
        plan = lancet_plan(self._costs, [k for k in PARTS if k in self._degrees])
        self._step()
        return plan

    @cached_property
    def families(self) -> dict[str, Plan]:
        """The plans that `joint` takes the best of, by where they come from; its own split is "joint"."""
        found = {name: self.plan(name) for name in layer_policies() if name != "joint"}
        found["any_order"] = any_order(self._costs, self._limit)
        if self._costs.can_split:
            found |= {"flowmoe": self.flowmoe, "lancet": self.lancet, "joint": self._jointly_split()}
        return found

    @cached_property
    def joint(self) -> Plan:
        plans = list(self.families.values())
        if self._costs.can_split:
            plans += self.ablation.values()
        self._done = self._total
        self._step()
        return best_of(plans, self._costs)

    @cached_property
    def ablation(self) -> dict[str, Plan]:
        """As the function of that name."""
        attention = SplitSearch(self._costs, with_exposed_gradients, self._step)
        attention.try_all(StepSplit(degree, degree) for degree in self._degrees)
        untuned = attention.best._replace(bucket_bytes=_UNTUNED_BYTES)
        found = {
            "pipelined experts": self.plan("pipemoe"),
            "attention": attention.plan(),
            "all-reduce": micro_schedule(self._costs, untuned).plan(),
            "tuned": self.flowmoe,
        }
        self._step()
        return found

    @cached_property
    def _tuned(self) -> SplitSearch:
        search = SplitSearch(self._costs, in_micro_batches, self._step)
        search.try_all(StepSplit(degree, degree, search.bucket_bytes(4)) for degree in self._degrees)
        search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(buckets)) for buckets in _BUCKETS)
        return search

    def _jointly_split(self) -> Plan:
        """FlowMoE's split, and from there on each part of it changed for as long as that is better."""
        search = self._tuned.copy()
        search.try_all(search.best._replace(forward=degree, backward=degree, weights=True) for degree in self._degrees)
        begun = None
        while begun != search.best:  # until no such change is better
            begun = search.best
            weights, sizes = (True, False), [search.bucket_bytes(count) for count in _BUCKETS]
            search.try_all(
                search.best._replace(backward=backward, bucket_bytes=size, weights=alone)
                for backward, size, alone in product(self._degrees, sizes, weights)
            )
            search.try_all(search.best._replace(forward=degree) for degree in self._degrees)
        search.try_all([self._split_by_layer(search.best)])
        return search.plan()

    def _split_by_layer(self, best: StepSplit) -> StepSplit:
        """From a split on, the degrees of each layer's dense part and pipeline changed for as long as that is better.

        Of many layers those at the ends are searched for with no others between them, of which the inner ones then have
        the degrees of their neighbour.
        """
        count = len(self._costs.layers)
        ends = [*range(count)] if count <= 2 * _ENDS else [*range(_ENDS), *range(count - _ENDS, count)]
        few = replace(self._costs, layers=tuple(self._costs.layers[layer] for layer in ends))
        search = SplitSearch(few, in_micro_batches, lambda: None)
        search.try_all([best.with_degrees(best.degrees(len(ends)))])
        for _ in range(_ROUNDS):
            begun_s = search.best_s
            search.try_all(search.best._replace(bucket_bytes=search.bucket_bytes(count)) for count in _BUCKETS)
            for phase in reversed(PHASES):
                for layers in [range(len(ends)), *([one] for one in range(len(ends)))]:
                    search.try_all(self._changed(search.best, phase, layers))
            self._step()
            if search.best_s > begun_s * (1 - _WORTH):
                break
        places = [min(layer, _ENDS - 1) if layer < count - _ENDS else layer - count for layer in range(count)]
        found = search.best.degrees(len(ends))
        return search.best.with_degrees({phase: tuple(of[place] for place in places) for phase, of in found.items()})

    def _changed(self, split: StepSplit, phase: str, layers: Sequence[int]) -> Iterator[StepSplit]:
        """A split whose degrees of some layers are those next to theirs, twice or half as many, or the other part's."""
        degrees, last = split.degrees(0), len(self._degrees) - 1

        def near(degree: int, other: int) -> tuple[int, ...]:
            place = self._degrees.index(degree)
            beside = self._degrees[max(0, place - 1)], self._degrees[min(last, place + 1)]
            return (*beside, *(one if one in self._degrees else degree for one in (2 * degree, degree // 2, other)))

        for which in range(5):
            for parts in (("dense", "rows"), ("rows",), ("dense",)):
                changed = list(degrees[phase])
                for layer in layers:
                    of = changed[layer]
                    there = {"dense": near(*of)[which], "rows": near(of.rows, of.dense)[which]}
                    changed[layer] = of._replace(**{part: there[part] for part in parts})
                yield split.with_degrees({**degrees, phase: tuple(changed)})

    def _step(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


def _both_passes_s(layer: LayerCosts, degree: int) -> float:
    return sum(one_queue_s(degree, chunk_times(layer.chunks[phase], degree)) for phase in PHASES)


def _pipemoe_passes(costs: StepCosts, limit: int) -> list[ChunkedPass]:
    """PipeMoE models neither all-gather nor reduce-scatter: it knows no expert sharding."""

    def modelled_s(layer: LayerCosts, degree: int) -> float:
        times = (chunk_times(layer.chunks[phase], degree) for phase in PHASES)
        return sum(one_queue_s(degree, t._replace(all_gather=0.0, reduce_scatter=0.0)) for t in times)

    return [
        ChunkedPass(one_queue, min(range(1, limit + 1), key=lambda degree: modelled_s(layer, degree)))
        for layer in costs.layers
    ]


def _fsmoe(costs: StepCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each layer and pass the best degree of the best of the orders; gradients by `partition.search`.

    Where chunks of the forward pass that are none of the backward pass cost something, one degree for both may be
    better.
    """
    own = _own_degrees(costs, orders, limit)
    if not any(layer.regroup_s for layer in costs.layers):
        return own
    return best_of([own, _one_degree(costs, orders, limit)], costs)


def _one_degree(costs: StepCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each layer the degree that is best for both passes together, without gradients between their chunks."""
    of_layer: dict[int, int] = {}  # layers are often one object many times
    chosen: dict[tuple[int, str, float], ChunkedPass] = {}

    def seconds(layer: LayerCosts, phase: str, order: Order, degree: int, gar: float = 0.0) -> float:
        return pass_s(layer.chunks[phase], degree, gar, order=order, contention=costs.contention)

    def best(layer: LayerCosts, phase: str, gar: float = 0.0) -> ChunkedPass:
        key, degree = (id(layer), phase, gar), of_layer[id(layer)]
        if key not in chosen:
            chosen[key] = ChunkedPass(min(orders, key=lambda order: seconds(layer, phase, order, degree, gar)), degree)
        return chosen[key]

    found: dict[int, list[PassOption]] = {}
    for layer in costs.layers:
        if id(layer) not in of_layer:
            taken_s = {
                degree: sum(min(seconds(layer, phase, order, degree) for order in orders) for phase in PHASES)
                for degree in range(1, limit + 1)
            }
            of_layer[id(layer)] = degree = min(taken_s, key=taken_s.__getitem__)
            back = layer.chunks["backward"]
            found[id(layer)] = _useful(
                [PassOption.from_stages(back, order, degree, costs.contention) for order in orders]
            )
    partition = search(costs, [found[id(layer)] for layer in costs.layers])
    forward = [best(layer, "forward") for layer in costs.layers]
    gars = [bucket_s(costs.all_reduce, middle) for middle in partition.middle]
    backward = [best(layer, "backward", gar) for layer, gar in zip(costs.layers, gars, strict=True)]
    return step_plan(costs, forward, backward, partition)


def _own_degrees(costs: StepCosts, orders: Sequence[Order], limit: int) -> Plan:
    """For each pass its own."""
    known: dict[int, tuple[ChunkedPass, list[PassOption]]] = {}  # layers are often one object many times
    for layer in costs.layers:
        if id(layer) not in known:
            there, back = (layer.chunks[phase] for phase in PHASES)
            found = [option for order in orders for option in pass_options(back, order, costs.contention, limit)]
            known[id(layer)] = (_best(there, 0.0, orders, costs, limit), _useful(found))
    forward = [known[id(layer)][0] for layer in costs.layers]
    partition = search(costs, [known[id(layer)][1] for layer in costs.layers])
    chosen: dict[tuple[int, float], ChunkedPass] = {}
    backward = []
    for layer, middle in zip(costs.layers, partition.middle, strict=True):
        if (id(layer), middle) not in chosen:
            gar = bucket_s(costs.all_reduce, middle)
            chosen[id(layer), middle] = _best(layer.chunks["backward"], gar, orders, costs, limit)
        backward.append(chosen[id(layer), middle])
    return step_plan(costs, forward, backward, partition)


def _best(
    chunks: Mapping[str, StageTime], gar: float, orders: Sequence[Order], costs: StepCosts, limit: int
) -> ChunkedPass:
    """The shortest pass with all-reduces of `gar` seconds; of equally short ones the first order's."""
    found = [
        (order, choose_degree(chunks, gar, order=order, contention=costs.contention, limit=limit)) for order in orders
    ]
    order, choice = min(found, key=lambda one: one[1].seconds)
    return ChunkedPass(order, choice.degree)


def _useful(found: Sequence[PassOption]) -> list[PassOption]:
    """Those that are the best for some all-reduce, the first for none; each hides more than the one before."""
    result: list[PassOption] = []
    for option in sorted(found, key=lambda one: (one.free_s, one.busy_s)):
        if not result or option.busy_s < result[-1].busy_s:
            result.append(option)
    return result
