"""Step times of the plans tried by a `PlanChooser`, their noise, and the trial budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fusedmoe.schedule.candidates import OFF, PlanCandidate

#: Trial budget: this fraction of `STEPS` steps, or of all steps of the job if there are more.
SHARE, STEPS = 0.02, 500

# A plan slower than the best by this factor is dropped.
_TOO_SLOW = 1.5
# Assumed relative error of predictions compared with each other.
_PREDICTION_ERROR = 0.1
# Steps of each of two plans before their medians are compared, and before the comparison is final.
_MIN_STEPS, _MAX_STEPS = 4, 8
# Spread of two medians, relative to a step time, above which they cannot rank plans.
_MAX_SPREAD = 1.0
# Standard deviation of the median of n normal numbers with a deviation of 1, times √n.
_MEDIAN_DEVIATION = 1.25


@dataclass(eq=False)
class Entry:
    """A candidate and its step times."""

    candidate: PlanCandidate
    seconds: list[float] = field(default_factory=list)  # without the first step
    first_s: float | None = None
    rounds: int = 0

    @property
    def median_s(self) -> float:
        """Median step time; infinite before the first measurement."""
        # The lower median: disturbances only lengthen steps.
        return statistics.median_low(self.seconds) if self.seconds else math.inf

    @property
    def expected_s(self) -> float:
        # A single long step may be an outlier.
        return min(self.median_s, math.inf if self.first_s is None else self.first_s)

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
        self.entries: list[Entry] = []
        self.num_steps = 0
        self._tried_before = 0
        self._charged_s = 0.0

    def begin_search(self, candidates: Sequence[PlanCandidate]) -> None:
        """Start a search among new candidates. Earlier searches stay charged to the budget."""
        self._charged_s, self._tried_before = self.spent_s, self.num_tried
        self.entries = [Entry(candidate) for candidate in candidates]

    def charge(self, seconds: float) -> None:
        self._charged_s += seconds

    @property
    def num_tried(self) -> int:
        first = sum(entry.first_s is not None for entry in self.entries[1:])
        return self._tried_before + first + sum(len(entry.seconds) for entry in self.entries)

    @property
    def spent_s(self) -> float:
        """Seconds charged to the budget: the excess of measured steps over the best median, plus `charge`."""
        best_s = self.best_median_s
        if not math.isfinite(best_s):
            return self._charged_s
        spent = [len(entry.seconds) * max(0.0, entry.expected_s - best_s) for entry in self.entries if entry.seconds]
        # The first entry's first step is the job's first step, which is slow with any plan.
        first = [max(0.0, entry.first_s - best_s) for entry in self.entries[1:] if entry.first_s is not None]
        return self._charged_s + (sum(spent) + sum(first))

    @property
    def best_median_s(self) -> float:
        """Infinite before the first measurement."""
        return min((entry.median_s for entry in self.entries), default=math.inf)

    @property
    def remaining_s(self) -> float:
        """Seconds left in the budget, less a reserve for the last step, which may be much slower."""
        return (SHARE * max(STEPS, self.num_steps) - 1.5) * self.best_median_s - self.spent_s

    @property
    def noise(self) -> float:
        """Standard deviation of step times with the same plan, relative to their median."""
        shares = [abs(b - a) / entry.median_s for entry in self.entries for a, b in pairwise(entry.seconds)]
        # For normal numbers with a deviation of 1, the median difference is √2 · 0.6745.
        return statistics.median(shares) / (math.sqrt(2) * 0.6745) if shares else 0.0

    def noise_between(self, first: Entry, second: Entry) -> float:
        """Standard deviation of the difference of two entries' medians, relative to a step time."""
        return self.noise * _MEDIAN_DEVIATION * math.sqrt(1 / len(first.seconds) + 1 / len(second.seconds))

    @property
    def is_too_noisy(self) -> bool:
        """True if the spread (two standard deviations) of the medians of the two most measured plans exceeds 100%."""
        pair = sorted((entry for entry in self.entries if entry.seconds), key=lambda entry: -len(entry.seconds))[:2]
        return len(pair) == 2 and 2 * self.noise_between(*pair) > _MAX_SPREAD

    def is_affordable(self, entry: Entry) -> bool:
        """Return whether the budget covers the expected excess of the entry's next step over the best median."""
        least = min(self.entries, key=lambda other: other.median_s)
        if not least.seconds or entry is least or self.must_run(entry):
            return True
        if entry.seconds:
            return entry.expected_s - least.median_s <= max(0.0, self.remaining_s)
        ratio = entry.candidate.predicted_s / least.candidate.predicted_s if least.candidate.predicted_s > 0 else 1.0
        return ratio <= _TOO_SLOW and 2 * (ratio - 1.0) * least.median_s <= self.remaining_s / 2

    def must_run(self, entry: Entry) -> bool:
        """Return whether an entry runs whatever the budget: OFF, until it has a measured step."""
        # Predictions for chunks may be wrong, and the gain over OFF is reported.
        return entry.candidate.family == OFF and not entry.seconds

    def is_too_slow(self, entry: Entry) -> bool:
        return entry.expected_s > _TOO_SLOW * self.best_median_s

    def better_half(self, pool: Sequence[Entry]) -> list[Entry]:
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

    def is_undecided(self, first: Entry, second: Entry) -> bool:
        """Return whether two entries need more steps to decide if the simpler one is as fast as the other."""
        simpler, larger = sorted((first, second), key=lambda entry: entry.simplicity)
        steps = min(len(first.seconds), len(second.seconds))
        if self.remaining_s <= 0 or steps >= _MAX_STEPS or simpler.median_s <= larger.median_s:
            return False
        return steps < _MIN_STEPS or self.is_as_fast(simpler, larger)

    def is_as_fast(self, entry: Entry, least: Entry) -> bool:
        """Return whether an entry's median exceeds the lowest median by no more than noise."""
        if entry is least or min(len(entry.seconds), len(least.seconds)) < _MIN_STEPS:
            return entry is least
        return entry.median_s <= least.median_s * (1 + self.noise_between(entry, least))

    @property
    def plausible(self) -> list[Entry]:
        """Tried entries, without those whose fastest step is far slower than all steps of another entry."""
        tried = [entry for entry in self.entries if entry.seconds]
        limit_s = _TOO_SLOW * min(max(entry.seconds) for entry in tried)
        return [entry for entry in tried if min(entry.seconds) <= limit_s]

    def likely_fastest(self) -> Entry:
        """Return the entry that is probably fastest. The weight of the predictions grows with the noise."""
        tried = self.plausible
        scale = statistics.median(entry.median_s / max(entry.candidate.predicted_s, 1e-12) for entry in tried)

        # The weight of the prediction grows with the noise.
        def likely_s(entry: Entry) -> float:
            prediction_weight = (self.noise / _PREDICTION_ERROR) ** 2 * _MEDIAN_DEVIATION**2 / len(entry.seconds)
            return (entry.median_s + prediction_weight * scale * entry.candidate.predicted_s) / (1 + prediction_weight)

        return min(tried, key=likely_s)
