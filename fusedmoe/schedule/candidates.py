"""Candidate plans of a training step: the best plan of each family by prediction, plans near one, and no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from fusedmoe.schedule.passes import Partition, alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, PlanSearch, Policy, whole_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, Degrees, buckets_after, idle_slot_plan, pass_of, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS

#: The family of a step without a plan: nothing in chunks, and gradients after the backward pass.
OFF = "off"

# Of the plans beside one, so many are worth measuring.
_BESIDE = 4


class PlanCandidate(NamedTuple):
    """A plan of a step that may be the fastest."""

    family: str  # the policy that it comes from, or `OFF`, whose plan has no tasks
    plan: Plan
    whole: bool  # micro-batches go through whole layers; else nothing but the layers' pipelines is in chunks
    predicted_s: float  # of a step, by the costs

    @property
    def name(self) -> str:
        """The family with its chunks forward and backward, and what else tells it from those beside it."""
        if self.family == OFF:
            return OFF
        both = (sorted({n for (of, _), n in self.plan.degrees.items() if of == phase}) for phase in PHASES)
        chunks = "+".join("–".join(map(str, dict.fromkeys(ns[:1] + ns[-1:]))) for ns in both)
        words = [self.family, f"{chunks} chunks"]
        if any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute):
            words.append("W tasks")
        if (size := self.plan.largest_bucket) and (self.whole or self._gradients == "idle slots"):
            words.append(f"buckets of {size / 2**10:.0f} KiB")
        return ", ".join(words)

    @property
    def policy(self) -> Policy | None:
        """The policy of its family; None for `OFF`, and for one that a job before had registered."""
        return ANY_ORDER if self.family == ANY_ORDER.name else POLICIES.get(self.family)

    @property
    def _gradients(self) -> str | None:
        return None if self.policy is None else self.policy.gradients


def distinct(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Returns each plan once, shortest prediction first."""
    first: dict[tuple[str, bool], PlanCandidate] = {}
    for one in candidates:
        first.setdefault((one.plan.fingerprint, one.whole), one)
    return sorted(first.values(), key=lambda one: one.predicted_s)


def family_candidates(
    costs: StepCosts, limit: int, samples: int | None, progress: Callable[[int, int], None]
) -> list[PlanCandidate]:
    """Returns the best plan of each family, and the plan without tasks; shortest prediction first. For its arguments
    see `PlanSearch`."""
    plans = PlanSearch(costs, limit, samples, progress).families
    whole = whole_policies()
    candidates = [PlanCandidate(name, plan, name in whole, makespan(plan, costs)) for name, plan in plans.items()]
    candidates.append(PlanCandidate(OFF, Plan(), False, makespan(plans["sequential"], costs)))
    return distinct(candidates)


def candidates_beside(one: PlanCandidate, costs: StepCosts, limit: int, samples: int | None) -> list[PlanCandidate]:
    """Returns plans of the same family with some more or fewer chunks, or other buckets: the best by prediction."""
    if one.policy is None or not one.policy.varies:
        return []
    plans = _splits_beside(one.plan, costs, limit, samples) if one.whole else _layers_beside(one, costs, limit)
    found = distinct(PlanCandidate(one.family, plan, one.whole, makespan(plan, costs)) for plan in plans)
    return [other for other in found if other.plan != one.plan][:_BESIDE]


def with_bucket_bytes(one: PlanCandidate, costs: StepCosts, size: int) -> PlanCandidate:
    """Returns a plan of `micro_schedule` with gradient buckets of that many bytes."""
    plan = micro_schedule(costs, StepSplit.from_plan(one.plan)._replace(bucket_bytes=size)).plan()
    return PlanCandidate(one.family, plan, one.whole, makespan(plan, costs))


def degrees_beside(base: PlanCandidate, costs: StepCosts, limit: int, samples: int | None) -> list[PlanCandidate]:
    """Returns the plans that differ from one of FlowMoE's in nothing but the number of micro-batches, which both
    passes have."""
    split = StepSplit.from_plan(base.plan)
    degrees = split.degrees(len(costs.layers))
    plans = []
    for change in _degrees_beside(limit, samples):
        changed = {phase: tuple(Degrees(*map(change, of)) for of in degrees[phase]) for phase in PHASES}
        plans.append(micro_schedule(costs, split.with_degrees(changed)).plan())
    found = distinct(PlanCandidate(base.family, plan, base.whole, makespan(plan, costs)) for plan in plans)
    return [other for other in found if other.plan != base.plan]


def predicted_s(plan: Plan, costs: StepCosts) -> float:
    """Returns the seconds of a step by a plan; without tasks, of one with nothing in chunks."""
    return makespan(plan if len(plan) else POLICIES["sequential"].plan(costs), costs)


def _splits_beside(plan: Plan, costs: StepCosts, limit: int, samples: int | None) -> Iterator[Plan]:
    split, largest = StepSplit.from_plan(plan), max(costs.gradient_bytes)
    changed = [split._replace(weights=not split.weights)]
    degrees = split.degrees(len(costs.layers))
    for degree, phase in product(_degrees_beside(limit, samples), PHASES):
        other = tuple(Degrees(*map(degree, of)) for of in degrees[phase])
        changed.append(split.with_degrees({**degrees, phase: other}))
    if split.bucket_bytes:
        sizes = (split.bucket_bytes // 2, split.bucket_bytes * 2)
        changed += [split._replace(bucket_bytes=max(1, min(largest, size))) for size in sizes]
    for one in dict.fromkeys(changed):
        yield micro_schedule(costs, one).plan()


def _degrees_beside(limit: int, samples: int | None = None) -> Iterator[Callable[[int], int]]:
    """Yields functions that change a degree: into itself, where the changed one cannot be."""

    def changed(how: Callable[[int], int], now: int) -> int:
        new = how(now)
        return new if 1 <= new <= limit and (samples is None or samples % new == 0) else now

    for how in (lambda r: r - 1, lambda r: r + 1, lambda r: r // 2, lambda r: 2 * r):
        yield partial(changed, how)


def _layers_beside(candidate: PlanCandidate, costs: StepCosts, limit: int) -> Iterator[Plan]:
    """Yields plans with the same orders and gradients, and other degrees in all layers, or smaller buckets."""
    plan, layers = candidate.plan, range(len(costs.layers))
    forward, backward = ([_chunked(plan, costs, layer, phase) for layer in layers] for phase in PHASES)
    same = [layer_pass.degree for layer_pass in forward] == [layer_pass.degree for layer_pass in backward]
    largest = plan.largest_bucket or 0

    def rebuilt(ahead: Sequence[ChunkedPass], back: Sequence[ChunkedPass], bucket_bytes: int) -> Plan:
        if candidate._gradients == "idle slots" and bucket_bytes:
            return idle_slot_plan(costs, ahead, back, bucket_bytes)
        if candidate._gradients == "exposed":
            return step_plan(costs, ahead, back, exposed=True)
        # The same bytes stay in the places that the plan has for them.
        middle = [sum(t.size or 0 for t in pass_of(plan, n, "backward").inter if t.size) for n in layers]
        beside = [sum(t.size or 0 for t in buckets_after(plan, n)) for n in layers]
        return step_plan(costs, ahead, back, Partition(tuple(map(float, middle)), tuple(map(float, beside))))

    for degree in _degrees_beside(limit):
        ahead, back = ([one._replace(degree=degree(one.degree)) for one in both] for both in (forward, backward))
        # Where both passes have the same degrees these change together, else each by itself.
        if same:
            yield rebuilt(ahead, back, largest)
        else:
            yield rebuilt(ahead, backward, largest)
            yield rebuilt(forward, back, largest)
    if candidate._gradients == "idle slots" and largest > 1:
        yield rebuilt(forward, backward, largest // 2)


def _chunked(plan: Plan, costs: StepCosts, layer: int, phase: str) -> ChunkedPass:
    """Returns the order and the degree that the plan has of one layer's chunks."""
    degree, kinds = plan.degrees[phase, layer], costs.layers[layer].chunks[phase]
    own = pass_of(plan, layer, phase)
    # The order is not written in a plan: it is the one that gives the same tasks on each resource.
    for order in (three_queues, alternating, one_queue):
        tasks = order(kinds, degree, phase, layer)
        if all(tuple(t for t in own.on(on) if t.kind in PIPELINE) == tuple(tasks.get(on, ())) for on in RESOURCES):
            break
    return ChunkedPass(order, degree)
