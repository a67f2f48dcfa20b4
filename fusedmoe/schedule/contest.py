"""A contest of plans while a job trains: candidates run in turn, step by step, and the fastest is kept.

    contest = Contest(lambda: candidates, beside)
    while …:
        seconds = step(contest.now.candidate.plan)
        contest.note(seconds)

Rounds of successive halving: all that are left do some steps in turn, their medians are compared, and the better half
goes on. What steps that were tried took longer than the best is bounded, whatever the machine does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.candidates import OFF, PlanCandidate

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


@dataclass(eq=False)
class Entry:
    """A candidate, and what its steps took.

    Attributes:
        seconds: of each step that counts.
        first_s: seconds of its first step, which does not count.
        rounds: the number of rounds that it was in.
    """

    candidate: PlanCandidate
    seconds: list[float] = field(default_factory=list)
    first_s: float | None = None
    rounds: int = 0

    @property
    def median_s(self) -> float:
        """The lower one of two: what disturbs a step makes it longer. Infinite before anything is measured."""
        return statistics.median_low(self.seconds) if self.seconds else math.inf

    @property
    def least_s(self) -> float:
        """Seconds that its next step is expected to take: one step that took long may have been chance."""
        return min(self.median_s, math.inf if self.first_s is None else self.first_s)


Propose = Callable[[Sequence[Entry]], Sequence[PlanCandidate]]


class Contest:
    """Finds the fastest candidate while steps are done. The same seconds lead to the same choices on every rank.

    The first step of a candidate does not count: it allocates, and connects. A candidate that takes far longer than the
    best, by what is predicted or by its first measurement, is dropped at once. Of those that are equally fast within
    what measurements spread, the one with the fewest tasks is chosen.

    Args:
        candidates: makes those of the first rounds, the most promising first; at least one.
        propose: further ones, given all that was tried; they run against the best so far. Nothing more ends the search.
        kept: what a job before has chosen, with its seconds, and others to check it against: if it still takes so long,
            nothing else is tried.
        steps: of each candidate in a round.
        drift: by which share steps must get longer or shorter for all to begin anew; None: never.
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
    ) -> None:
        if steps < 1 or (drift is not None and drift <= 0):
            raise ConfigError(
                f"measuring plans needs steps = {steps} of at least 1, and drift = {drift} above 0 or None"
            )
        self._make, self._propose, self._kept = candidates, propose, kept
        self._steps, self._drift = steps, drift
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
        return self._spent_before_s + self._spent_now_s()

    def _spent_now_s(self) -> float:
        best_s = self._least_s()
        if not math.isfinite(best_s):
            return 0.0
        spent = [len(one.seconds) * max(0.0, one.least_s - best_s) for one in self.entries if one.seconds]
        # The steps that the job begins with would have been slow with any plan.
        first = [max(0.0, one.first_s - best_s) for one in self.entries[1:] if one.first_s is not None]
        return sum(spent) + sum(first)

    def _least_s(self) -> float:
        return min((one.median_s for one in self.entries), default=math.inf)

    def _left_s(self) -> float:
        """Returns the seconds that trying may still cost. Some are kept back for the last step, which may take far
        longer."""
        best_s = self._least_s()
        return (_SHARE * max(_STEPS, self._done) - 1.5) * best_s - self.spent_s

    @property
    def noise(self) -> float:
        """Spread of steps with the same plan, as a share: the median difference of two that follow each other."""
        found = [
            abs(b - a) / one.median_s
            for one in self.entries
            for a, b in zip(one.seconds, one.seconds[1:], strict=False)
        ]
        return statistics.median(found) / (math.sqrt(2) * 0.6745) if found else 0.0

    def _begin(self) -> Generator[Entry, float, None]:
        if self._kept is not None:
            kept_s, kept = self._kept
            self.entries = [Entry(one) for one in kept]
            self.best = self.entries[0]
            yield from self._rounds(self.entries)
            if not self._drifted(self.entries[0].median_s, kept_s):
                yield from self._watch()
        while True:
            yield from self._choose()
            yield from self._watch()

    def _choose(self) -> Generator[Entry, float, None]:
        """Tries candidates until there are no more, or they cost too much."""
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
            # The first candidate also does the steps that a job begins with, which are slow with any plan.
            if pool is new:
                self.best = new[0]
                yield from self._start(new[0])
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
        """The fastest where there were too few steps to tell: predictions count as far as steps differ by chance."""
        tried = [one for one in self.entries if one.seconds]
        scale = statistics.median(one.median_s / max(one.candidate.predicted_s, 1e-12) for one in tried)

        def likely_s(one: Entry) -> float:
            chance = (self.noise / _PREDICTED) ** 2 * _OF_MEDIAN**2 / len(one.seconds)
            return (one.median_s + chance * scale * one.candidate.predicted_s) / (1 + chance)

        return min(tried, key=likely_s)

    def _start(self, one: Entry) -> Generator[Entry, float, None]:
        """The steps that a job begins with, which are slow with any plan."""
        for _ in range(_START):
            one.first_s = yield one

    def _rounds(self, pool: Sequence[Entry]) -> Generator[Entry, float, None]:
        """Halves a pool until one is left, which is then `best`."""
        while True:
            for entry in pool:
                entry.rounds += 1
            for _ in range(self._steps):
                for entry in list(pool):
                    if not self._affords(entry):
                        pool = [left for left in pool if left is not entry]
                        continue
                    if entry.first_s is None:
                        entry.first_s = yield entry
                        if math.isfinite(self._least_s()) and self._left_s() <= 0:
                            pool = [left for left in pool if left is not entry]
                            continue
                    entry.seconds.append((yield entry))
                    if entry.least_s > _FAR * self._least_s():
                        pool = [left for left in pool if left is not entry]
            pool = [entry for entry in pool if entry.seconds]
            if len(pool) != 2 or not self._undecided(*pool):
                pool = self._better_half(pool)
            if not pool:
                self.best = min(self.entries, key=lambda entry: entry.median_s)
            else:
                self.best = min(pool, key=lambda entry: entry.median_s) if len(pool) > 1 else pool[0]
            if len(pool) <= 1:
                return

    def _affords(self, entry: Entry) -> bool:
        """Returns True if a candidate may go on: what it is expected to take beyond the best is left to spend."""
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
        """Returns the better half of several, with the simplest of the equally good among them; of two the one to
        choose."""
        ranked = sorted(pool, key=lambda one: (one.median_s, *_tasks(one)))
        if len(ranked) < 2:
            return ranked
        least = min(self.entries, key=lambda one: one.median_s)
        simplest = min((one for one in ranked if self._as_good(one, least)), key=_tasks, default=ranked[0])
        kept = ranked[: -(-len(ranked) // 2)]
        return kept if simplest in kept and len(kept) > 1 else [*kept[:-1], simplest]

    def _undecided(self, one: Entry, other: Entry) -> bool:
        """Returns True if more steps would tell two apart, of which the simpler one may be as good."""
        simpler, more = sorted((one, other), key=_tasks)
        steps = min(len(one.seconds), len(other.seconds))
        if self._left_s() <= 0 or steps >= _ENOUGH or simpler.median_s <= more.median_s:
            return False
        return steps < _FEW or self._as_good(simpler, more)

    def _as_good(self, one: Entry, least: Entry) -> bool:
        """Returns True if one is as fast as the fastest, for all that is known; of few steps nothing is."""
        if one is least or min(len(one.seconds), len(least.seconds)) < _FEW:
            return one is least
        # Two medians differ by chance as much as this.
        margin = self.noise * _OF_MEDIAN * math.sqrt(1 / len(one.seconds) + 1 / len(least.seconds))
        return one.median_s <= least.median_s * (1 + margin)

    def _watch(self) -> Generator[Entry, float, None]:
        """Keeps to the best until steps take longer or shorter, and there is something to spend on finding out."""
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
