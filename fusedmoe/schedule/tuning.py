"""Tuning while a job trains: plans that may be the fastest, and a contest that keeps the fastest of them.

    contest = Contest(lambda: family_candidates(costs, limit, samples, progress), beside)
    while …:
        seconds = step(contest.now.candidate.plan)
        contest.note(seconds)

Candidates are the best plan of each family by prediction, those beside one, and none at all. They run in turn, step by
step, in rounds of successive halving: all that are left do some steps, their medians are compared, and the better half
goes on. What steps that were tried took longer than the best is bounded, whatever the machine does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

from fusedmoe.errors import ConfigError
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

#: Steps whose median is compared with what was measured before, once a plan is chosen.
WINDOW = 10

# Trying costs at most this share of so many steps, and of all steps where they are more.
_SHARE, _STEPS = 0.02, 500
# What takes so many times as long as the best is dropped at once.
_FAR = 1.5
# So often what was dropped may run again, because the best took longer in more steps than in its first.
_SECOND_LOOKS = 4
# How far off predictions are beside each other, as a share.
_PREDICTED = 0.1
# Steps that a job begins with, which count for nothing.
_START = 2
# Of two that are equally fast the simpler one is taken after so many steps; before the first number nobody can tell.
_FEW, _ENOUGH = 4, 8
# Of the median of n measurements with a spread of 1: its own, times √n.
_OF_MEDIAN = 1.25


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


@dataclass(eq=False)
class Entry:
    """A candidate, and what its steps took."""

    candidate: PlanCandidate
    seconds: list[float] = field(default_factory=list)  # of each step that counts
    first_s: float | None = None  # of its first step, which does not count
    rounds: int = 0  # that it was in

    @property
    def median_s(self) -> float:
        """Median of its seconds; infinite before anything is measured."""
        # The lower one of two: what disturbs a step makes it longer.
        return statistics.median_low(self.seconds) if self.seconds else math.inf

    @property
    def least_s(self) -> float:
        """Seconds that its next step is expected to take."""
        # One step that took long may have been chance.
        return min(self.median_s, math.inf if self.first_s is None else self.first_s)


Propose = Callable[[Sequence[Entry]], Sequence[PlanCandidate]]

#: Measures costs again; see `Contest`.
Renew = Callable[[float], "float | None"]


class Contest:
    """Finds the fastest candidate while steps are done. The same seconds lead to the same choices on every rank.

    A candidate that takes far longer than the best, by what is predicted or by its first measurement, is dropped at
    once. Of those that are equally fast within what measurements spread, the one with the fewest tasks is chosen.

    Args:
        candidates: makes those of the first rounds, the most promising first; at least one.
        propose: further ones, given all that was tried; they run against the best so far. Nothing more ends the search.
        kept: what a job before has chosen, with its seconds, and others to check it against: if it still takes so long,
            nothing else is tried.
        steps: of each candidate in a round.
        drift: by which share steps must get longer or shorter for all to begin anew; None: never.
        renew: measures the costs again that candidates are made by, when steps have drifted. It is told how many
            seconds it may take, and returns those that it took; None: it is asked once more after another step by the
            best plan.
    Attributes:
        now: to follow in the next step.
        best: the fastest so far; once `settled`, what was chosen.
        entries: all that were tried, or are to be.
    Raises:
        ConfigError: no candidates, or numbers that are not positive.
    """

    def __init__(
        self,
        candidates: Callable[[], Sequence[PlanCandidate]],
        propose: Propose = lambda entries: (),
        *,
        kept: tuple[float, Sequence[PlanCandidate]] | None = None,
        steps: int = 2,
        drift: float | None = 0.1,
        renew: Renew = lambda seconds: 0.0,
    ) -> None:
        if steps < 1 or (drift is not None and drift <= 0):
            raise ConfigError(
                f"measuring plans needs steps = {steps} of at least 1, and drift = {drift} above 0 or None"
            )
        self._make, self._propose, self._kept = candidates, propose, kept
        self._steps, self._drift, self._renew = steps, drift, renew
        self.settled = False
        self.entries: list[Entry] = []
        self._done = self._tried_before = 0
        self._spent_before_s = 0.0
        self._run = self._begin()
        self.now = next(self._run)
        self.best = self.now

    def note(self, seconds: float) -> None:
        """Takes the seconds of a step that followed `now`, on the slowest rank, and chooses what the next step
        follows."""
        self._done += 1
        self.now = self._run.send(seconds)

    @property
    def tried(self) -> int:
        """The number of steps that were done to find out."""
        first = sum(one.first_s is not None for one in self.entries[1:])
        return self._tried_before + first + sum(len(one.seconds) for one in self.entries)

    @property
    def spent_s(self) -> float:
        """Seconds that those steps took longer than the best would have."""
        best_s = self._least_s()
        if not math.isfinite(best_s):
            return self._spent_before_s
        spent = [len(one.seconds) * max(0.0, one.least_s - best_s) for one in self.entries if one.seconds]
        # The steps that the job begins with would have been slow with any plan.
        first = [max(0.0, one.first_s - best_s) for one in self.entries[1:] if one.first_s is not None]
        return self._spent_before_s + (sum(spent) + sum(first))

    def _least_s(self) -> float:
        return min((one.median_s for one in self.entries), default=math.inf)

    def _left_s(self) -> float:
        """Returns the seconds that trying may still cost."""
        # Some are kept back for the last step, which may take far longer.
        return (_SHARE * max(_STEPS, self._done) - 1.5) * self._least_s() - self.spent_s

    @property
    def noise(self) -> float:
        """Spread of steps with the same plan, as a share: the median difference of two that follow each other."""
        shares = [abs(b - a) / entry.median_s for entry in self.entries for a, b in pairwise(entry.seconds)]
        # Of normal numbers with a spread of 1 the median difference is √2 · 0.6745.
        return statistics.median(shares) / (math.sqrt(2) * 0.6745) if shares else 0.0

    def _begin(self) -> Generator[Entry, float, None]:
        if self._kept is not None:
            kept_s, kept = self._kept
            self.entries = [Entry(one) for one in kept]
            self.best = self.entries[0]
            yield from self._rounds(self.entries)
            if not self._drifted(self.entries[0].median_s, kept_s):
                yield from self._watch()
            yield from self._renewal()
        while True:
            yield from self._choose()
            yield from self._watch()
            yield from self._renewal()

    def _renewal(self) -> Generator[Entry, float, None]:
        """Has costs measured again, for half of the seconds that are left."""
        self.settled, usual_s = False, self.best.median_s
        while (took_s := self._renew(max(0.0, self._left_s() / 2))) is None:
            # What is measured in the midst of a step makes that longer.
            self._spent_before_s += max(0.0, (yield self.best) - usual_s)
        self._spent_before_s += took_s

    def _choose(self) -> Generator[Entry, float, None]:
        """Tries candidates until none is left, or trying has cost too much."""
        # Every search has to stay within the same share of all steps.
        self._spent_before_s, self._tried_before = self.spent_s, self.tried
        self.settled, before = False, [self.best.candidate] if self.entries else []
        self.entries = []
        known = [(candidate.plan, candidate.whole) for candidate in before]
        more = [*before, *(new for new in self._make() if (new.plan, new.whole) not in known)]
        if not more:
            raise ConfigError("measuring plans: there is none that can run here")
        while more:
            new = [Entry(candidate) for candidate in more]
            pool = [self.best, *new] if self.entries else new
            self.entries += new
            if pool is new:
                self.best = new[0]
                # The first candidate also does the steps that a job begins with, which are slow with any plan.
                for _ in range(_START):
                    new[0].first_s = yield new[0]
            yield from self._rounds(pool)
            # The best may have been lucky in few steps: whoever is faster by now runs against it again.
            for _ in range(_SECOND_LOOKS):
                least = min(self.entries, key=lambda entry: entry.median_s)
                if self._as_good(self.best, least):
                    break
                yield from self._rounds([self.best, least])
            more = list(self._propose(self.entries)) if self._left_s() > 0 else []
        if self._left_s() <= 0:
            self.best = self._most_likely()

    def _most_likely(self) -> Entry:
        """Returns the fastest where there were too few steps to tell."""
        tried = [one for one in self.entries if one.seconds]
        scale = statistics.median(one.median_s / max(one.candidate.predicted_s, 1e-12) for one in tried)

        # Predictions count as far as steps differ by chance.
        def likely_s(one: Entry) -> float:
            chance = (self.noise / _PREDICTED) ** 2 * _OF_MEDIAN**2 / len(one.seconds)
            return (one.median_s + chance * scale * one.candidate.predicted_s) / (1 + chance)

        return min(tried, key=likely_s)

    def _rounds(self, pool: Sequence[Entry]) -> Generator[Entry, float, None]:
        """Halves a pool until one is left, which is then `best`."""
        while True:
            for entry in pool:
                entry.rounds += 1
            for _ in range(self._steps):
                for entry in list(pool):
                    if not (yield from self._stays(entry)):
                        pool = [left for left in pool if left is not entry]
            pool = [entry for entry in pool if entry.seconds]
            if len(pool) != 2 or not self._undecided(*pool):
                pool = self._better_half(pool)
            self.best = min(pool or self.entries, key=lambda entry: entry.median_s)
            if len(pool) <= 1:
                return

    def _stays(self, entry: Entry) -> Generator[Entry, float, bool]:
        """Does a step of a candidate, and returns True if it stays in its round."""
        if not self._affords(entry):
            return False
        if entry.first_s is None:
            # The first step of a candidate does not count: it allocates, and connects.
            entry.first_s = yield entry
            if math.isfinite(self._least_s()) and self._left_s() <= 0:
                return False
        entry.seconds.append((yield entry))
        return entry.least_s <= _FAR * self._least_s()

    def _affords(self, entry: Entry) -> bool:
        """Returns True if what a candidate is expected to take beyond the best is left to spend."""
        least = min(self.entries, key=lambda other: other.median_s)
        if not least.seconds or entry is least:
            return True
        if entry.seconds:
            return entry.least_s - least.median_s <= max(0.0, self._left_s())
        ratio = entry.candidate.predicted_s / least.candidate.predicted_s if least.candidate.predicted_s > 0 else 1.0
        # Nobody knows what nothing in chunks takes as well as that the costs of chunks may be wrong.
        far = ratio > _FAR and entry.candidate.family != OFF
        return not far and 2 * (ratio - 1.0) * least.median_s <= self._left_s() / 2

    def _better_half(self, pool: Sequence[Entry]) -> list[Entry]:
        """Returns the better half, with the simplest of the equally good among them; of two the one to choose."""
        ranked = sorted(pool, key=lambda one: (one.median_s, *_tasks(one)))
        if len(ranked) < 2:
            return ranked
        least = min(self.entries, key=lambda one: one.median_s)
        simplest = min((one for one in ranked if self._as_good(one, least)), key=_tasks, default=ranked[0])
        kept = ranked[: -(-len(ranked) // 2)]
        return kept if simplest in kept and len(kept) > 1 else [*kept[:-1], simplest]

    def _undecided(self, one: Entry, other: Entry) -> bool:
        """Returns True if more steps would tell whether the simpler one of two is as good."""
        simpler, more = sorted((one, other), key=_tasks)
        steps = min(len(one.seconds), len(other.seconds))
        if self._left_s() <= 0 or steps >= _ENOUGH or simpler.median_s <= more.median_s:
            return False
        return steps < _FEW or self._as_good(simpler, more)

    def _as_good(self, one: Entry, least: Entry) -> bool:
        """Returns True if one is as fast as the fastest, for all that is known."""
        # Of few steps nothing is known.
        if one is least or min(len(one.seconds), len(least.seconds)) < _FEW:
            return one is least
        # Two medians differ by chance as much as this.
        margin = self.noise * _OF_MEDIAN * math.sqrt(1 / len(one.seconds) + 1 / len(least.seconds))
        return one.median_s <= least.median_s * (1 + margin)

    def _watch(self) -> Generator[Entry, float, None]:
        """Keeps to the best plan until steps take longer or shorter, and time is left to try others."""
        self.settled, chosen, settled_s = True, self.best, self.best.median_s
        while True:
            window = []
            for _ in range(WINDOW):
                window.append((yield chosen))
            if self._drifted(statistics.median(window), settled_s) and self._left_s() > _SHARE * _STEPS / 4 * settled_s:
                return

    def _drifted(self, seconds: float, before_s: float) -> bool:
        return self._drift is not None and abs(seconds - before_s) > self._drift * before_s


def _tasks(one: Entry) -> tuple[int, float]:
    return len(one.candidate.plan), one.median_s
