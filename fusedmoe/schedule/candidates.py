"""Plans that may be the fastest: the best of each family by prediction, those beside one, and none at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from fusedmoe.schedule.passes import Partition, alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, PlanSearch, Policy, whole_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, Degrees, buckets_after, idle_slot_plan, pass_of, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS, TaskKind

#: The family of a step without a plan: nothing in chunks, and gradients after the backward pass.
OFF = "off"

# Of the plans beside one, so many are worth measuring.
_BESIDE = 4


class PlanCandidate(NamedTuple):
    """A plan that may be the fastest.

    Attributes:
        family: the policy that it comes from, or `OFF`, whose plan has no tasks.
        plan: of a step.
        whole: micro-batches go through whole layers; else nothing but the layers' pipelines is in chunks.
        predicted_s: seconds of a step, by the costs.
    """

    family: str
    plan: Plan
    whole: bool
    predicted_s: float

    @property
    def name(self) -> str:
        """The family with its chunks forward and backward, and what else tells it from those beside it."""
        if self.family == OFF:
            return OFF
        both = (_span(n for (of, _), n in self.plan.degrees.items() if of == phase) for phase in PHASES)
        found = f"{self.family}, {'+'.join(both)} chunks"
        if any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute):
            found += ", W tasks"
        size = _largest_bucket(self.plan)
        in_buckets = self.whole or self._gradients == "idle slots"
        return f"{found}, buckets of {size / 2**10:.0f} KiB" if size and in_buckets else found

    @property
    def policy(self) -> Policy | None:
        """The policy of its family; None for `OFF`, and for one that a job before had registered."""
        return ANY_ORDER if self.family == ANY_ORDER.name else POLICIES.get(self.family)

    @property
    def _gradients(self) -> str | None:
        return None if self.policy is None else self.policy.gradients


def _span(degrees: Iterable[int]) -> str:
    found = sorted(set(degrees))
    return f"{found[0]}–{found[-1]}" if len(found) > 1 else str(*found)


def _largest_bucket(plan: Plan) -> int:
    return max((task.size or 0 for task in plan.inter if task.kind == TaskKind.GRADIENT_ALL_REDUCE), default=0)


def distinct(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Returns each plan once, shortest prediction first."""
    first: dict[tuple[str, bool], PlanCandidate] = {}
    for one in candidates:
        first.setdefault((one.plan.fingerprint, one.whole), one)
    return sorted(first.values(), key=lambda one: one.predicted_s)


def family_candidates(
    costs: StepCosts, limit: int, samples: int | None, progress: Callable[[int, int], None]
) -> list[PlanCandidate]:
    """Returns the best plan of each family, and the plan without tasks; shortest prediction first.

    Args:
        costs, limit, samples, progress: as for `PlanSearch`.
    """
    found = PlanSearch(costs, limit, samples, progress).families
    whole = whole_policies()
    candidates = [PlanCandidate(name, plan, name in whole, makespan(plan, costs)) for name, plan in found.items()]
    candidates.append(PlanCandidate(OFF, Plan(), False, makespan(found["sequential"], costs)))
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

    def change(of: Callable[[int], int]) -> Callable[[int], int]:
        def degree(now: int) -> int:
            new = of(now)
            return new if 1 <= new <= limit and (samples is None or samples % new == 0) else now

        return degree

    for of in (lambda r: r - 1, lambda r: r + 1, lambda r: r // 2, lambda r: 2 * r):
        yield change(of)


def _layers_beside(candidate: PlanCandidate, costs: StepCosts, limit: int) -> Iterator[Plan]:
    """Yields plans with the same orders and gradients, and other degrees in all layers: in both passes, where they are
    the same in both, else in each; of a policy with buckets in idle slots also a plan with smaller buckets."""
    plan, layers = candidate.plan, range(len(costs.layers))
    forward, backward = ([_chunked(plan, costs, layer, phase) for layer in layers] for phase in PHASES)
    same = [layer_pass.degree for layer_pass in forward] == [layer_pass.degree for layer_pass in backward]
    largest = _largest_bucket(plan)

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
        ahead, back = (
            [layer_pass._replace(degree=degree(layer_pass.degree)) for layer_pass in passes]
            for passes in (forward, backward)
        )
        yield from (
            [rebuilt(ahead, back, largest)]
            if same
            else [rebuilt(ahead, backward, largest), rebuilt(forward, back, largest)]
        )
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
