"""Candidate plans of a training step: the best plan of each policy, variations of it, and no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from fusedmoe.schedule.passes import GradientPartition, alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, PlanSearch, Policy, micro_batch_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, Degrees, buckets_after, idle_slot_plan, pass_of, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS

#: Family of the empty plan: unchunked layers, gradients after the backward pass.
OFF = "off"

_MAX_NEIGHBOURS = 4


class PlanCandidate(NamedTuple):
    family: str  # name of its policy, or `OFF` with an empty plan
    plan: Plan
    uses_micro_batches: bool  # micro-batches pass through whole layers; False: only pipelines are chunked
    predicted_s: float  # step time

    @property
    def name(self) -> str:
        if self.family == OFF:
            return OFF
        both = (sorted({n for (of, _), n in self.plan.degrees.items() if of == phase}) for phase in PHASES)
        chunks = "+".join("–".join(map(str, dict.fromkeys(ns[:1] + ns[-1:]))) for ns in both)
        words = [self.family, f"{chunks} chunks"]
        if any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute):
            words.append("W tasks")
        if (size := self.plan.largest_bucket) and (self.uses_micro_batches or self._gradients == "idle slots"):
            words.append(f"buckets of {size / 2**10:.0f} KiB")
        return ", ".join(words)

    @property
    def policy(self) -> Policy | None:
        """The policy that made the plan; None for `OFF` and for unregistered user policies."""
        return ANY_ORDER if self.family == ANY_ORDER.name else POLICIES.get(self.family)

    @property
    def _gradients(self) -> str | None:
        return None if self.policy is None else self.policy.gradients


def distinct(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Return each plan once, sorted by predicted time."""
    first: dict[tuple[str, bool], PlanCandidate] = {}
    for one in candidates:
        first.setdefault((one.plan.fingerprint, one.uses_micro_batches), one)
    return sorted(first.values(), key=lambda one: one.predicted_s)


def family_candidates(
    costs: StepCosts, limit: int, samples: int | None, progress: Callable[[int, int], None]
) -> list[PlanCandidate]:
    """Return the best plan of each policy and the empty plan, by predicted time. Arguments: see `PlanSearch`."""
    plans = PlanSearch(costs, limit, samples, progress).joint_candidates
    whole = micro_batch_policies()
    candidates = [PlanCandidate(name, plan, name in whole, makespan(plan, costs)) for name, plan in plans.items()]
    candidates.append(PlanCandidate(OFF, Plan(), False, makespan(plans["sequential"], costs)))
    return distinct(candidates)


def neighbour_candidates(base: PlanCandidate, costs: StepCosts, limit: int, samples: int | None) -> list[PlanCandidate]:
    """Return the best variations of a plan by predicted time: other chunk counts, bucket sizes or W tasks."""
    if base.policy is None or not base.policy.has_variations:
        return []
    plans = (
        _neighbour_splits(base.plan, costs, limit, samples)
        if base.uses_micro_batches
        else _neighbour_layers(base, costs, limit)
    )
    found = distinct(PlanCandidate(base.family, plan, base.uses_micro_batches, makespan(plan, costs)) for plan in plans)
    return [other for other in found if other.plan != base.plan][:_MAX_NEIGHBOURS]


def with_bucket_bytes(one: PlanCandidate, costs: StepCosts, size: int) -> PlanCandidate:
    plan = micro_schedule(costs, StepSplit.from_plan(one.plan)._replace(bucket_bytes=size)).plan()
    return PlanCandidate(one.family, plan, one.uses_micro_batches, makespan(plan, costs))


def neighbour_degrees(base: PlanCandidate, costs: StepCosts, limit: int, samples: int | None) -> list[PlanCandidate]:
    """Return variations of a FlowMoE plan with another number of micro-batches in both passes."""
    split = StepSplit.from_plan(base.plan)
    degrees = split.degrees(len(costs.layers))
    plans = []
    for change in _degree_changes(limit, samples):
        changed = {phase: tuple(Degrees(*map(change, of)) for of in degrees[phase]) for phase in PHASES}
        plans.append(micro_schedule(costs, split.with_degrees(changed)).plan())
    found = distinct(PlanCandidate(base.family, plan, base.uses_micro_batches, makespan(plan, costs)) for plan in plans)
    return [other for other in found if other.plan != base.plan]


def predicted_s(plan: Plan, costs: StepCosts) -> float:
    """Return the predicted step time; the empty plan means unchunked layers."""
    return makespan(plan if len(plan) else POLICIES["sequential"].plan(costs), costs)


def _neighbour_splits(plan: Plan, costs: StepCosts, limit: int, samples: int | None) -> Iterator[Plan]:
    split, largest = StepSplit.from_plan(plan), max(costs.gradient_bytes)
    changed = [split._replace(weights=not split.weights)]
    degrees = split.degrees(len(costs.layers))
    for degree, phase in product(_degree_changes(limit, samples), PHASES):
        other = tuple(Degrees(*map(degree, of)) for of in degrees[phase])
        changed.append(split.with_degrees({**degrees, phase: other}))
    if split.bucket_bytes:
        sizes = (split.bucket_bytes // 2, split.bucket_bytes * 2)
        changed += [split._replace(bucket_bytes=max(1, min(largest, size))) for size in sizes]
    for one in dict.fromkeys(changed):
        yield micro_schedule(costs, one).plan()


def _degree_changes(limit: int, samples: int | None = None) -> Iterator[Callable[[int], int]]:
    """Yield functions that change a degree, or keep it if the new degree is invalid."""

    def changed(how: Callable[[int], int], now: int) -> int:
        new = how(now)
        return new if 1 <= new <= limit and (samples is None or samples % new == 0) else now

    for how in (lambda r: r - 1, lambda r: r + 1, lambda r: r // 2, lambda r: 2 * r):
        yield partial(changed, how)


def _neighbour_layers(candidate: PlanCandidate, costs: StepCosts, limit: int) -> Iterator[Plan]:
    """Yield plans with other degrees in all layers, or smaller buckets, in the same orders."""
    plan, layers = candidate.plan, range(len(costs.layers))
    forward, backward = ([_chunked(plan, costs, layer, phase) for layer in layers] for phase in PHASES)
    same = [layer_pass.degree for layer_pass in forward] == [layer_pass.degree for layer_pass in backward]
    largest = plan.largest_bucket or 0

    def rebuilt(ahead: Sequence[ChunkedPass], back: Sequence[ChunkedPass], bucket_bytes: int) -> Plan:
        if candidate._gradients == "idle slots" and bucket_bytes:
            return idle_slot_plan(costs, ahead, back, bucket_bytes)
        if candidate._gradients == "exposed":
            return step_plan(costs, ahead, back, exposed=True)
        middle = [sum(t.size or 0 for t in pass_of(plan, n, "backward").inter if t.size) for n in layers]
        beside = [sum(t.size or 0 for t in buckets_after(plan, n)) for n in layers]
        return step_plan(costs, ahead, back, GradientPartition(tuple(map(float, middle)), tuple(map(float, beside))))

    for degree in _degree_changes(limit):
        ahead, back = ([one._replace(degree=degree(one.degree)) for one in both] for both in (forward, backward))
        if same:
            yield rebuilt(ahead, back, largest)
        else:
            yield rebuilt(ahead, backward, largest)
            yield rebuilt(forward, back, largest)
    if candidate._gradients == "idle slots" and largest > 1:
        yield rebuilt(forward, backward, largest // 2)


def _chunked(plan: Plan, costs: StepCosts, layer: int, phase: str) -> ChunkedPass:
    degree, kinds = plan.degrees[phase, layer], costs.layers[layer].chunks[phase]
    own = pass_of(plan, layer, phase)
    # A plan does not store its order function: find the one that reproduces the task orders.
    for order in (three_queues, alternating, one_queue):
        tasks = order(kinds, degree, phase, layer)
        if all(tuple(t for t in own.on(on) if t.kind in PIPELINE) == tuple(tasks.get(on, ())) for on in RESOURCES):
            break
    return ChunkedPass(order, degree)
