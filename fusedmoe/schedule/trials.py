"""Step times of the plans that a `PlanChooser` tries, their noise, and the budget for trying them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fusedmoe.schedule.candidates import OFF, PlanCandidate

#: The budget for trying plans: this share of 500 steps, or of all steps if they are more.
SHARE, STEPS = 0.02, 500

# A plan whose steps take this many times as long as the best plan's is dropped at once.
_FAR = 1.5
# Error of predictions relative to each other, as a share.
_PREDICTED = 0.1
# Steps of each of two plans before their medians are compared at all, and before the simpler one must be as fast.
_FEW, _ENOUGH = 4, 8
# Standard deviation of the median of n normal numbers with a deviation of 1, times √n.
_OF_MEDIAN = 1.25


@dataclass(eq=False)
class Entry:
    """A candidate and the seconds of its steps."""

    candidate: PlanCandidate
    seconds: list[float] = field(default_factory=list)  # of each step that counts
    first_s: float | None = None  # of its first step, which does not count
    rounds: int = 0  # that it was in

    @property
    def median_s(self) -> float:
        """Median of its seconds; infinite before anything is measured."""
        # The lower one of two: a disturbance makes a step longer.
        return statistics.median_low(self.seconds) if self.seconds else math.inf

    @property
    def least_s(self) -> float:
        """Seconds that its next step is expected to take."""
        # A single long step may be chance.
        return min(self.median_s, math.inf if self.first_s is None else self.first_s)

    @property
    def simplicity(self) -> tuple[int, float]:
        """Sort key: number of tasks, then the median."""
        return len(self.candidate.plan), self.median_s


class TriedPlan(NamedTuple):
    """A row of `PlanChooser.table`; `measured_s`: the median, None for a plan that was not tried."""

    name: str
    predicted_s: float
    measured_s: float | None
    steps: int
    rounds: int


class Trials:
    """Candidates of one search with their step times. Deterministic: equal seconds give equal answers on every rank.

    Attributes:
        entries: candidates that were tried, or are to be tried.
        num_steps: steps of the job, whether they tried a plan or not.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_steps = 0
        self._tried_before = 0
        self._spent_before_s = 0.0

    def begin_search(self, candidates: Sequence[PlanCandidate]) -> None:
        """Replace the entries. Costs of earlier searches count against the same budget."""
        self._spent_before_s, self._tried_before = self.spent_s, self.num_tried
        self.entries = [Entry(candidate) for candidate in candidates]

    def spend(self, seconds: float) -> None:
        """Charge the budget for something other than a slower plan."""
        self._spent_before_s += seconds

    @property
    def num_tried(self) -> int:
        """Number of steps that tried plans."""
        first = sum(entry.first_s is not None for entry in self.entries[1:])
        return self._tried_before + first + sum(len(entry.seconds) for entry in self.entries)

    @property
    def spent_s(self) -> float:
        """Seconds that these steps took in excess of the best plan."""
        best_s = self.least_s
        if not math.isfinite(best_s):
            return self._spent_before_s
        spent = [len(entry.seconds) * max(0.0, entry.least_s - best_s) for entry in self.entries if entry.seconds]
        # The first entry's first step is one of the job's first steps, which are slow with any plan.
        first = [max(0.0, entry.first_s - best_s) for entry in self.entries[1:] if entry.first_s is not None]
        return self._spent_before_s + (sum(spent) + sum(first))

    @property
    def least_s(self) -> float:
        """Smallest median; infinite before anything is measured."""
        return min((entry.median_s for entry in self.entries), default=math.inf)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        # A reserve for the last step, which may take far longer.
        return (SHARE * max(STEPS, self.num_steps) - 1.5) * self.least_s - self.spent_s

    @property
    def noise(self) -> float:
        """Spread of steps with the same plan, as a share: the median difference of two consecutive ones."""
        shares = [abs(b - a) / entry.median_s for entry in self.entries for a, b in pairwise(entry.seconds)]
        # Of normal numbers with a deviation of 1 the median difference is √2 · 0.6745.
        return statistics.median(shares) / (math.sqrt(2) * 0.6745) if shares else 0.0

    def is_affordable(self, entry: Entry) -> bool:
        """Return whether the budget covers the excess that a step of this candidate is expected to take."""
        least = min(self.entries, key=lambda other: other.median_s)
        if not least.seconds or entry is least:
            return True
        if entry.seconds:
            return entry.least_s - least.median_s <= max(0.0, self.left_s)
        ratio = entry.candidate.predicted_s / least.candidate.predicted_s if least.candidate.predicted_s > 0 else 1.0
        # OFF is tried in any case: the predicted costs of chunks may be wrong.
        is_far = ratio > _FAR and entry.candidate.family != OFF
        return not is_far and 2 * (ratio - 1.0) * least.median_s <= self.left_s / 2

    def is_far(self, entry: Entry) -> bool:
        """Return whether a candidate is too slow to stay in its round."""
        return entry.least_s > _FAR * self.least_s

    def better_half(self, pool: Sequence[Entry]) -> list[Entry]:
        """Return the faster half, which includes the simplest of the equally fast entries; of two the one to choose."""
        ranked = sorted(pool, key=lambda entry: (entry.median_s, *entry.simplicity))
        if len(ranked) < 2:
            return ranked
        least = min(self.entries, key=lambda entry: entry.median_s)
        as_fast = (entry for entry in ranked if self.is_as_fast(entry, least))
        simplest = min(as_fast, key=lambda entry: entry.simplicity, default=ranked[0])
        half = ranked[: -(-len(ranked) // 2)]
        return half if simplest in half and len(half) > 1 else [*half[:-1], simplest]

    def is_undecided(self, first: Entry, second: Entry) -> bool:
        """Return whether more steps would show if the simpler one of two is as fast."""
        simpler, larger = sorted((first, second), key=lambda entry: entry.simplicity)
        steps = min(len(first.seconds), len(second.seconds))
        if self.left_s <= 0 or steps >= _ENOUGH or simpler.median_s <= larger.median_s:
            return False
        return steps < _FEW or self.is_as_fast(simpler, larger)

    def is_as_fast(self, entry: Entry, least: Entry) -> bool:
        """Return whether the medians of an entry and of the fastest one differ by no more than chance."""
        if entry is least or min(len(entry.seconds), len(least.seconds)) < _FEW:
            return entry is least
        margin = self.noise * _OF_MEDIAN * math.sqrt(1 / len(entry.seconds) + 1 / len(least.seconds))
        return entry.median_s <= least.median_s * (1 + margin)

    def most_likely(self) -> Entry:
        """Return the entry that is most likely the fastest after too few steps to decide by medians."""
        tried = [entry for entry in self.entries if entry.seconds]
        scale = statistics.median(entry.median_s / max(entry.candidate.predicted_s, 1e-12) for entry in tried)

        # The noisier the steps, the more the prediction weighs.
        def likely_s(entry: Entry) -> float:
            chance = (self.noise / _PREDICTED) ** 2 * _OF_MEDIAN**2 / len(entry.seconds)
            return (entry.median_s + chance * scale * entry.candidate.predicted_s) / (1 + chance)

        return min(tried, key=likely_s)
