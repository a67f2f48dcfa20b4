"""Candidate plans of a training step, and trials of them.

Candidates are the best plan of each policy, variations of it, and no plan. Trials are the step times of candidates
tried by a `PlanChooser`, their noise, and the trial budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

from fusedmoe.schedule.passes import GradientPartition, alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, PlanSearch, Policy, micro_batch_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, Degrees, buckets_after, extract_layer_pass, idle_slot_plan, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS

#: Family of the empty plan: unchunked layers, gradients after the backward pass.
OFF_FAMILY = "off"

_MAX_NEIGHBOURS = 4

#: Trial budget: this fraction of `MIN_BUDGET_STEPS` steps, or of all steps of the job if there are more.
TRIAL_BUDGET_SHARE, MIN_BUDGET_STEPS = 0.02, 500

# A plan slower than the best by this factor is dropped.
_MAX_SLOWDOWN = 1.5
# Assumed relative error of predictions compared with each other.
_PREDICTION_ERROR = 0.1
# Steps of each of two plans before their medians are compared, and before the comparison is final.
_MIN_STEPS_TO_COMPARE, _MAX_STEPS_TO_COMPARE = 4, 8
# Spread of two medians, relative to a step time, above which they cannot rank plans.
_MAX_SPREAD = 1.0
# Standard deviation of the median of n normal numbers with a deviation of 1, times √n.
_MEDIAN_STANDARD_DEVIATION = 1.25


class PlanCandidate(NamedTuple):
    family: str  # name of its policy, or `OFF_FAMILY` with an empty plan
    plan: Plan
    uses_micro_batches: bool  # micro-batches pass through whole layers; False: only pipelines are chunked
    predicted_s: float  # step time

    @property
    def name(self) -> str:
        if self.family == OFF_FAMILY:
            return OFF_FAMILY
        both = (sorted({n for (of, _), n in self.plan.degrees.items() if of == phase}) for phase in PHASES)
        chunks = "+".join("–".join(map(str, dict.fromkeys(ns[:1] + ns[-1:]))) for ns in both)
        words = [self.family, f"{chunks} chunks"]
        if any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute):
            words.append("W tasks")
        if (size := self.plan.largest_bucket) and (self.uses_micro_batches or self._gradient_strategy == "idle slots"):
            words.append(f"buckets of {size / 2**10:.0f} KiB")
        return ", ".join(words)

    @property
    def policy(self) -> Policy | None:
        """The policy that made the plan; None for `OFF_FAMILY` and for unregistered user policies."""
        return ANY_ORDER if self.family == ANY_ORDER.name else POLICIES.get(self.family)

    @property
    def _gradient_strategy(self) -> str | None:
        return None if self.policy is None else self.policy.gradients


def sort_distinct(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Return each plan once, sorted by predicted time."""
    first: dict[tuple[str, bool], PlanCandidate] = {}
    for one in candidates:
        first.setdefault((one.plan.fingerprint, one.uses_micro_batches), one)
    return sorted(first.values(), key=lambda one: one.predicted_s)


def family_candidates(
    costs: StepCosts, max_degree: int, samples: int | None, progress: Callable[[int, int], None]
) -> list[PlanCandidate]:
    """Return the best plan of each policy and the empty plan, by predicted time. Arguments: see `PlanSearch`."""
    plans = PlanSearch(costs, max_degree, samples, progress).joint_candidates
    whole = micro_batch_policies()
    candidates = [PlanCandidate(name, plan, name in whole, makespan(plan, costs)) for name, plan in plans.items()]
    candidates.append(PlanCandidate(OFF_FAMILY, Plan(), False, makespan(plans["sequential"], costs)))
    return sort_distinct(candidates)


def neighbour_candidates(
    base: PlanCandidate, costs: StepCosts, max_degree: int, samples: int | None
) -> list[PlanCandidate]:
    """Return the best variations of a plan by predicted time: other chunk counts, bucket sizes or W tasks."""
    if base.policy is None or not base.policy.has_variations:
        return []
    plans = (
        _neighbour_splits(base.plan, costs, max_degree, samples)
        if base.uses_micro_batches
        else _neighbour_layers(base, costs, max_degree)
    )
    return _other_candidates(base, plans, costs)[:_MAX_NEIGHBOURS]


def replace_bucket_bytes(one: PlanCandidate, costs: StepCosts, size: int) -> PlanCandidate:
    plan = micro_schedule(costs, StepSplit.from_plan(one.plan)._replace(bucket_bytes=size)).plan()
    return one._replace(plan=plan, predicted_s=makespan(plan, costs))


def neighbour_degrees(
    base: PlanCandidate, costs: StepCosts, max_degree: int, samples: int | None
) -> list[PlanCandidate]:
    """Return variations of a FlowMoE plan with another number of micro-batches in both passes."""
    split = StepSplit.from_plan(base.plan)
    degrees = split.degrees(len(costs.layers))
    plans = []
    for change in _degree_changes(max_degree, samples):
        changed = {phase: tuple(Degrees(*map(change, of)) for of in degrees[phase]) for phase in PHASES}
        plans.append(micro_schedule(costs, split.with_degrees(changed)).plan())
    return _other_candidates(base, plans, costs)


def _other_candidates(base: PlanCandidate, plans: Iterable[Plan], costs: StepCosts) -> list[PlanCandidate]:
    found = sort_distinct(base._replace(plan=plan, predicted_s=makespan(plan, costs)) for plan in plans)
    return [other for other in found if other.plan != base.plan]


def predicted_s(plan: Plan, costs: StepCosts) -> float:
    """Return the predicted step time; the empty plan means unchunked layers."""
    return makespan(plan if len(plan) else POLICIES["sequential"].plan(costs), costs)


def _neighbour_splits(plan: Plan, costs: StepCosts, max_degree: int, samples: int | None) -> Iterator[Plan]:
    split, largest = StepSplit.from_plan(plan), max(costs.gradient_bytes)
    changed = [split._replace(weights=not split.weights)]
    degrees = split.degrees(len(costs.layers))
    for degree, phase in product(_degree_changes(max_degree, samples), PHASES):
        other = tuple(Degrees(*map(degree, of)) for of in degrees[phase])
        changed.append(split.with_degrees({**degrees, phase: other}))
    if split.bucket_bytes:
        sizes = (split.bucket_bytes // 2, split.bucket_bytes * 2)
        changed += [split._replace(bucket_bytes=max(1, min(largest, size))) for size in sizes]
    for one in dict.fromkeys(changed):
        yield micro_schedule(costs, one).plan()


def _degree_changes(max_degree: int, samples: int | None = None) -> Iterator[Callable[[int], int]]:
    """Yield functions that change a degree, or keep it if the new degree is invalid."""

    def changed(how: Callable[[int], int], now: int) -> int:
        new = how(now)
        return new if 1 <= new <= max_degree and (samples is None or samples % new == 0) else now

    for how in (lambda r: r - 1, lambda r: r + 1, lambda r: r // 2, lambda r: 2 * r):
        yield partial(changed, how)


def _neighbour_layers(candidate: PlanCandidate, costs: StepCosts, max_degree: int) -> Iterator[Plan]:
    """Yield plans with other degrees in all layers, or smaller buckets, in the same orders."""
    plan, layers = candidate.plan, range(len(costs.layers))
    forward, backward = ([_recover_chunked_pass(plan, costs, layer, phase) for layer in layers] for phase in PHASES)
    same = [layer_pass.degree for layer_pass in forward] == [layer_pass.degree for layer_pass in backward]
    largest = plan.largest_bucket or 0

    def rebuilt(ahead: Sequence[ChunkedPass], back: Sequence[ChunkedPass], bucket_bytes: int) -> Plan:
        if candidate._gradient_strategy == "idle slots" and bucket_bytes:
            return idle_slot_plan(costs, ahead, back, bucket_bytes)
        if candidate._gradient_strategy == "exposed":
            return step_plan(costs, ahead, back, exposed=True)
        middle = [sum(t.size or 0 for t in extract_layer_pass(plan, n, "backward").inter if t.size) for n in layers]
        beside = [sum(t.size or 0 for t in buckets_after(plan, n)) for n in layers]
        return step_plan(costs, ahead, back, GradientPartition(tuple(map(float, middle)), tuple(map(float, beside))))

    for degree in _degree_changes(max_degree):
        ahead, back = ([one._replace(degree=degree(one.degree)) for one in both] for both in (forward, backward))
        if same:
            yield rebuilt(ahead, back, largest)
        else:
            yield rebuilt(ahead, backward, largest)
            yield rebuilt(forward, back, largest)
    if candidate._gradient_strategy == "idle slots" and largest > 1:
        yield rebuilt(forward, backward, largest // 2)


def _recover_chunked_pass(plan: Plan, costs: StepCosts, layer: int, phase: str) -> ChunkedPass:
    degree, kinds = plan.degrees[phase, layer], costs.layers[layer].chunks[phase]
    own = extract_layer_pass(plan, layer, phase)
    # A plan does not store its order function: find the one that reproduces the task orders.
    for order in (three_queues, alternating, one_queue):
        tasks = order(kinds, degree, phase, layer)
        if all(tuple(t for t in own.on(on) if t.kind in PIPELINE) == tuple(tasks.get(on, ())) for on in RESOURCES):
            break
    return ChunkedPass(order, degree)


@dataclass(eq=False)
class CandidateTimes:
    """A candidate and its step times."""

    candidate: PlanCandidate
    step_times_s: list[float] = field(default_factory=list)  # without the first step
    first_step_s: float | None = None
    rounds: int = 0

    @property
    def median_s(self) -> float:
        """Median step time; infinite before the first measurement."""
        # The lower median: disturbances only lengthen steps.
        return statistics.median_low(self.step_times_s) if self.step_times_s else math.inf

    @property
    def expected_s(self) -> float:
        # A single long step may be an outlier.
        return min(self.median_s, math.inf if self.first_step_s is None else self.first_step_s)

    @property
    def simplicity(self) -> tuple[int, float]:
        """Sort key: number of tasks, then the median."""
        return len(self.candidate.plan), self.median_s


class TriedPlan(NamedTuple):
    """A row of `PlanChooser.table`.

    Attributes:
        predicted_s: step time by simulation.
        measured_s: median step time; None if the plan was not tried.
        steps, rounds: numbers of measured steps, and of trial rounds that included the plan.
    """

    name: str
    predicted_s: float
    measured_s: float | None
    steps: int
    rounds: int


class Trials:
    """Candidates of one search, their step times and the trial budget.

    Ranks that pass equal times get equal results from all methods.

    Attributes:
        entries: candidates tried or to be tried.
        num_steps: all steps of the job, including steps without a trial.
    """

    def __init__(self) -> None:
        self.entries: list[CandidateTimes] = []
        self.num_steps = 0
        self._num_earlier_trial_steps = 0
        self._charged_budget_s = 0.0

    def begin_search(self, candidates: Sequence[PlanCandidate]) -> None:
        """Start a search among new candidates. Earlier searches stay charged to the budget."""
        self._charged_budget_s, self._num_earlier_trial_steps = self.spent_s, self.num_tried
        self.entries = [CandidateTimes(candidate) for candidate in candidates]

    def charge_budget(self, seconds: float) -> None:
        self._charged_budget_s += seconds

    @property
    def num_tried(self) -> int:
        first = sum(entry.first_step_s is not None for entry in self.entries[1:])
        return self._num_earlier_trial_steps + first + sum(len(entry.step_times_s) for entry in self.entries)

    @property
    def spent_s(self) -> float:
        """Seconds charged to the budget: the excess of measured steps over the best median, plus `charge_budget`."""
        best_s = self.best_median_s
        if not math.isfinite(best_s):
            return self._charged_budget_s
        spent = [
            len(entry.step_times_s) * max(0.0, entry.expected_s - best_s)
            for entry in self.entries
            if entry.step_times_s
        ]
        # The first entry's first step is the job's first step, which is slow with any plan.
        first = [max(0.0, entry.first_step_s - best_s) for entry in self.entries[1:] if entry.first_step_s is not None]
        return self._charged_budget_s + (sum(spent) + sum(first))

    @property
    def best_median_s(self) -> float:
        """Infinite before the first measurement."""
        return min((entry.median_s for entry in self.entries), default=math.inf)

    @property
    def remaining_s(self) -> float:
        """Seconds left in the budget, less a reserve for the last step, which may be much slower."""
        return (TRIAL_BUDGET_SHARE * max(MIN_BUDGET_STEPS, self.num_steps) - 1.5) * self.best_median_s - self.spent_s

    @property
    def noise(self) -> float:
        """Standard deviation of step times with the same plan, relative to their median."""
        shares = [abs(b - a) / entry.median_s for entry in self.entries for a, b in pairwise(entry.step_times_s)]
        # For normal numbers with a deviation of 1, the median difference is √2 · 0.6745.
        return statistics.median(shares) / (math.sqrt(2) * 0.6745) if shares else 0.0

    def noise_between(self, first: CandidateTimes, second: CandidateTimes) -> float:
        """Standard deviation of the difference of two entries' medians, relative to a step time."""
        return (
            self.noise
            * _MEDIAN_STANDARD_DEVIATION
            * math.sqrt(1 / len(first.step_times_s) + 1 / len(second.step_times_s))
        )

    @property
    def is_too_noisy(self) -> bool:
        """True if the spread (two standard deviations) of the medians of the two most measured plans exceeds 100%."""
        pair = sorted(
            (entry for entry in self.entries if entry.step_times_s), key=lambda entry: -len(entry.step_times_s)
        )[:2]
        return len(pair) == 2 and 2 * self.noise_between(*pair) > _MAX_SPREAD

    def is_affordable(self, entry: CandidateTimes) -> bool:
        """Return whether the budget covers the expected excess of the entry's next step over the best median."""
        least = min(self.entries, key=lambda other: other.median_s)
        if not least.step_times_s or entry is least or self.must_run(entry):
            return True
        if entry.step_times_s:
            return entry.expected_s - least.median_s <= max(0.0, self.remaining_s)
        ratio = entry.candidate.predicted_s / least.candidate.predicted_s if least.candidate.predicted_s > 0 else 1.0
        return ratio <= _MAX_SLOWDOWN and 2 * (ratio - 1.0) * least.median_s <= self.remaining_s / 2

    def must_run(self, entry: CandidateTimes) -> bool:
        """Return whether an entry runs whatever the budget: OFF_FAMILY, until it has a measured step."""
        # Predictions for chunks may be wrong, and the gain over OFF_FAMILY is reported.
        return entry.candidate.family == OFF_FAMILY and not entry.step_times_s

    def is_too_slow(self, entry: CandidateTimes) -> bool:
        return entry.expected_s > _MAX_SLOWDOWN * self.best_median_s

    def faster_half(self, pool: Sequence[CandidateTimes]) -> list[CandidateTimes]:
        """Return the faster half of the pool (successive halving).

        The simplest of the entries as fast as the best within the noise is always kept, if necessary in place of the
        slowest entry of the faster half. Of two entries, only one is kept.
        """
        ranked = sorted(pool, key=lambda entry: (entry.median_s, *entry.simplicity))
        if len(ranked) < 2:
            return ranked
        least = min(self.entries, key=lambda entry: entry.median_s)
        as_fast = (entry for entry in ranked if self.is_as_fast(entry, least))
        simplest = min(as_fast, key=lambda entry: entry.simplicity, default=ranked[0])
        half = ranked[: -(-len(ranked) // 2)]
        return half if simplest in half and len(half) > 1 else [*half[:-1], simplest]

    def is_undecided(self, first: CandidateTimes, second: CandidateTimes) -> bool:
        """Return whether two entries need more steps to decide if the simpler one is as fast as the other."""
        simpler, larger = sorted((first, second), key=lambda entry: entry.simplicity)
        steps = min(len(first.step_times_s), len(second.step_times_s))
        if self.remaining_s <= 0 or steps >= _MAX_STEPS_TO_COMPARE or simpler.median_s <= larger.median_s:
            return False
        return steps < _MIN_STEPS_TO_COMPARE or self.is_as_fast(simpler, larger)

    def is_as_fast(self, entry: CandidateTimes, least: CandidateTimes) -> bool:
        """Return whether an entry's median exceeds the lowest median by no more than noise."""
        if entry is least or min(len(entry.step_times_s), len(least.step_times_s)) < _MIN_STEPS_TO_COMPARE:
            return entry is least
        return entry.median_s <= least.median_s * (1 + self.noise_between(entry, least))

    @property
    def plausible_entries(self) -> list[CandidateTimes]:
        """Tried entries, without those whose fastest step is far slower than all steps of another entry."""
        tried = [entry for entry in self.entries if entry.step_times_s]
        limit_s = _MAX_SLOWDOWN * min(max(entry.step_times_s) for entry in tried)
        return [entry for entry in tried if min(entry.step_times_s) <= limit_s]

    def likely_fastest(self) -> CandidateTimes:
        """Return the entry that is probably fastest. The weight of the predictions grows with the noise."""
        tried = self.plausible_entries
        scale = statistics.median(entry.median_s / max(entry.candidate.predicted_s, 1e-12) for entry in tried)

        # The weight of the prediction grows with the noise.
        def likely_s(entry: CandidateTimes) -> float:
            prediction_weight = (
                (self.noise / _PREDICTION_ERROR) ** 2 * _MEDIAN_STANDARD_DEVIATION**2 / len(entry.step_times_s)
            )
            return (entry.median_s + prediction_weight * scale * entry.candidate.predicted_s) / (1 + prediction_weight)

        return min(tried, key=likely_s)
