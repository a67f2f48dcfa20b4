"""The choice of a plan: predict, try, keep, and watch for drift.

    chooser = PlanChooser(source)
    for batch in batches:
        with chooser:
            ...  # a whole step, which follows chooser.now

Candidates run in turn, step by step, in rounds of successive halving: all remaining candidates run a few steps, their
medians are compared, and the faster half stays. The time that slower plans cost is bounded on any machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.candidates import OFF, PlanCandidate
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.trials import SHARE, STEPS, Entry, Trials, TriedPlan

#: Steps whose median is compared with the seconds that a plan was chosen by.
WINDOW = 10

# Rounds between the best plan and one with a lower median: the best took longer in later steps than in its first ones.
_SECOND_LOOKS = 4
# First steps of a job, which do not count.
_START = 2
# Noise above this share is reported.
_UNSURE = 0.1


class Phase(Enum):
    """Phase of a `PlanChooser`."""

    PREDICT = "makes candidates by costs; ends before the next step"
    MEASURE = "the next steps measure costs while they follow the best plan so far"
    CONFIRM = "steps follow an earlier job's choice, and the runner-up"
    TRY = "steps follow candidates in turn"
    WATCH = "steps follow the chosen plan; their median is compared, a window at a time"
    KEEP = "steps follow the chosen plan; their seconds are ignored"


#: The phases that can follow each phase.
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREDICT: frozenset({Phase.MEASURE, Phase.CONFIRM, Phase.TRY, Phase.KEEP}),
    Phase.MEASURE: frozenset({Phase.PREDICT}),
    Phase.CONFIRM: frozenset({Phase.WATCH, Phase.MEASURE}),
    Phase.TRY: frozenset({Phase.WATCH}),
    Phase.WATCH: frozenset({Phase.MEASURE, Phase.KEEP}),
    Phase.KEEP: frozenset(),
}


class PlanSource:
    """Makes plans for a `PlanChooser` and applies them. Subclasses override what they support.

    Methods are called on all ranks at the same step, and must return the same on each; `slowest` provides for equal
    seconds.
    """

    @property
    def has_costs(self) -> bool:
        """Return whether candidates can be predicted. Otherwise `measure` is called first."""
        return True

    def candidates(self) -> Sequence[PlanCandidate]:
        """Return the candidates to begin with, most promising first; at least one."""
        return [PlanCandidate(OFF, Plan(), False, math.inf)]

    def earlier_choice(self) -> tuple[float, Sequence[PlanCandidate]] | None:
        """Return the seconds of the plan that an earlier job has chosen, that plan, and others to compare it with."""
        return None

    def more(self, chooser: PlanChooser) -> Sequence[PlanCandidate]:
        """Return further candidates, which run against the best so far. None ends the search."""
        return ()

    def measure(self, chooser: PlanChooser, budget_s: float) -> float | None:
        """Measure costs in at most `budget_s`; return the seconds spent, or None: call again after the next step."""
        return 0.0

    def follow(self, candidate: PlanCandidate) -> None:
        """Apply a plan to the steps from now on."""

    def slowest(self, seconds: list[float]) -> list[float]:
        """Return the element-wise maximum over ranks."""
        return seconds

    def report(self, chooser: PlanChooser) -> None:
        """Called once a plan is chosen by measurement."""

    def guard(self) -> AbstractContextManager[None]:
        """Return a context around all other calls after a step; a failure in it must reach all ranks."""
        return nullcontext()

    def now_s(self, chooser: PlanChooser) -> float:
        """Return the time in seconds at which the work launched so far is complete."""
        return time.perf_counter()


class PlanChooser:
    """Chooses a plan: by prediction alone, or by the time of training steps. The same on every rank.

    One state machine (`Phase`, `TRANSITIONS`)::

        PREDICT ──> TRY ───────> WATCH ── drift ──> MEASURE ──> PREDICT
           │                       └── drift=None ──> KEEP
           ├──────> CONFIRM ───> WATCH, or MEASURE if the earlier choice takes another time now
           ├──────> MEASURE      without costs
           └──────> KEEP         by prediction alone (steps=None)

    A candidate that takes far longer than the best, by prediction or by its first step, is dropped at once. Of plans
    that are equally fast within the noise, the one with the fewest tasks is chosen. Trying plans costs at most 2% of
    500 steps, or of all steps if they are more.

    Args:
        source: makes candidates and applies them.
        steps: of each candidate in a round; None: the first candidate is kept without a trial.
        drift: share by which the median of steps must change for another search; None: never.
    Attributes:
        phase: see `Phase`.
        best: the fastest entry so far; the chosen one if `settled`.
        trials: seconds of all candidates.
    Raises:
        ConfigError: no candidate, or `steps` or `drift` that are not positive.
    """

    def __init__(self, source: PlanSource, *, steps: int | None = 2, drift: float | None = 0.1) -> None:
        if (steps is not None and steps < 1) or (drift is not None and drift <= 0):
            raise ConfigError(
                f"measuring plans needs steps = {steps} of at least 1, and drift = {drift} above 0 or None"
            )
        self.source, self.trials, self.phase = source, Trials(), Phase.PREDICT
        self.best = Entry(PlanCandidate(OFF, Plan(), False, math.inf))  # until anything is predicted
        self._steps, self._drift = steps, drift
        self._earlier_s = math.inf
        self._window: list[float] = []
        self._skips_next = False
        self._began_s = 0.0
        self._followed: PlanCandidate | None = None
        # As text: an exception would keep the caller's frames, and their tensors, alive.
        self._failure = ""
        self._run = self._phases()
        self._entry = next(self._run)
        self._follow()

    @property
    def now(self) -> PlanCandidate:
        """The candidate that the next step follows."""
        return self._entry.candidate

    @property
    def plan(self) -> Plan:
        """The plan that the next step follows; without tasks: nothing in chunks."""
        return self.now.plan

    @property
    def settled(self) -> bool:
        """Return whether a plan is chosen."""
        return self.phase in (Phase.WATCH, Phase.KEEP)

    def note(self, seconds: float) -> None:
        """Record the seconds of a whole step on this rank. Collective, but not in every step.

        An error of the source ends the search on all ranks.

        Raises:
            ConfigError: seconds that are not positive and finite, or an earlier call has ended the search.
        """
        if self._failure:
            raise ConfigError(
                f"PlanChooser.note: the search failed in an earlier step: {self._failure}. Make a new PlanChooser."
            )
        if self._skips_next:
            self._skips_next = False
            return
        if self.phase is Phase.KEEP:
            return
        self._window.append(seconds)
        # Ranks exchange the seconds of a window at a time where nothing depends on a single step.
        if self.settled and len(self._window) < WINDOW:
            return
        was_settled, is_valid = self.settled, True
        try:
            with self.source.guard():
                window, self._window = self._window, []
                # All ranks wait for the slowest, so its seconds are the step's.
                slowest = self.source.slowest(window)
                is_valid = all(0 < step_s < math.inf for step_s in slowest)
                if not is_valid:
                    raise ConfigError(f"PlanChooser.note: a step took {slowest} s; give its seconds, more than 0")
                for step_s in slowest:
                    self.trials.num_steps += 1
                    self._entry = self._run.send(step_s)
                self._follow()
        except BaseException as error:
            # The generator has ended on the rank that failed. Another rank's generator must not run on by itself.
            if is_valid:
                self._failure = f"{type(error).__name__}: {error}"
            raise
        if self.settled and not was_settled:
            self.source.report(self)

    def skip(self) -> None:
        """Ignore the next step that is noted. Call it on every rank after a checkpoint, for example."""
        # Work that is left on one rank delays the next step of all.
        self._skips_next = True

    def __enter__(self) -> PlanChooser:
        self._began_s = self.source.now_s(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Other ranks may never reach the end of a step that failed here.
        if kind is None:
            self.note(self.source.now_s(self) - self._began_s)

    def table(self) -> list[TriedPlan]:
        """List all candidates, fastest first."""
        rows = []
        for entry in self.trials.entries:
            measured_s = entry.median_s if entry.seconds else None
            name, predicted_s = entry.candidate.name, entry.candidate.predicted_s
            rows.append(TriedPlan(name, predicted_s, measured_s, len(entry.seconds), entry.rounds))
        return sorted(rows, key=lambda row: row.measured_s or math.inf)

    def line(self) -> str:
        """Describe the best plan so far, and how much faster it is than others."""
        trials, best = self.trials, self.best
        has_families = len({entry.candidate.family for entry in trials.entries}) > 1
        others: dict[str, Entry] = {}
        for entry in sorted(trials.entries, key=lambda entry: entry.median_s):
            if entry.seconds and entry is not best:
                others.setdefault(entry.candidate.family if has_families else entry.candidate.name, entry)
        named = [(name, entry) for name, entry in others.items() if name != best.candidate.family]
        shown = [*named[:2], *(pair for pair in named[2:] if pair[0] == OFF)]
        than = ", ".join(
            f"{name} {entry.median_s:.3g} s ({entry.median_s / best.median_s - 1:+.0%})" for name, entry in shown
        )
        # With much noise predictions may outweigh measurements.
        unsure = f" (steps differ by {trials.noise:.0%} by chance)" if trials.noise > _UNSURE else ""
        first = f"schedule: {best.candidate.name}: {best.median_s:.3g} s a step"
        last = f"{trials.num_tried} steps tried, {trials.spent_s:.2g} s spent{unsure}"
        return "; ".join(filter(None, (first, than, last)))

    def _follow(self) -> None:
        # Applying a plan is collective and slow; most steps keep the plan of the step before.
        if self.now is not self._followed:
            self.source.follow(self.now)
            self._followed = self.now

    def _phases(self) -> Generator[Entry, float, None]:
        """Run phase after phase: yield the entry that the next step follows, and receive that step's seconds."""
        while True:
            self._enter((yield from _RUN[self.phase](self)))

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase

    def _predict(self) -> Generator[Entry, float, Phase]:
        yield from ()  # no step
        if not self.source.has_costs:
            return Phase.MEASURE
        is_first = not self.trials.entries
        if is_first and self._steps is not None and (earlier := self.source.earlier_choice()) is not None:
            self._earlier_s, candidates = earlier
            self.trials.begin_search(candidates)
            self.best = self.trials.entries[0]
            return Phase.CONFIRM
        before = [] if is_first else [self.best.candidate]
        known = [(candidate.plan, candidate.whole) for candidate in before]
        made = [new for new in self.source.candidates() if (new.plan, new.whole) not in known]
        if not before and not made:
            raise ConfigError("measuring plans: there is none that can run here")
        self.trials.begin_search([*before, *made])
        self.best = self.trials.entries[0]
        return Phase.TRY if self._steps is not None else Phase.KEEP

    def _measure(self) -> Generator[Entry, float, Phase]:
        usual_s = self.best.median_s
        # Half of the budget is left for trying plans afterwards.
        while (took_s := self.source.measure(self, max(0.0, self.trials.left_s / 2))) is None:
            # The step that measures takes longer.
            self.trials.spend(max(0.0, (yield self.best) - usual_s))
        self.trials.spend(took_s)
        return Phase.PREDICT

    def _confirm(self) -> Generator[Entry, float, Phase]:
        first = self.trials.entries[0]
        yield from self._rounds(self.trials.entries)
        return Phase.MEASURE if self._has_drifted(first.median_s, self._earlier_s) else Phase.WATCH

    def _try(self) -> Generator[Entry, float, Phase]:
        pool = list(self.trials.entries)
        # The first candidate also runs the first steps of the job.
        for _ in range(_START):
            pool[0].first_s = yield pool[0]
        while pool:
            yield from self._rounds(pool)
            # The best may have been lucky in few steps: it runs again with the entry that is the fastest by now.
            for _ in range(_SECOND_LOOKS):
                least = min(self.trials.entries, key=lambda entry: entry.median_s)
                if self.trials.is_as_fast(self.best, least):
                    break
                yield from self._rounds([self.best, least])
            more = [Entry(new) for new in self.source.more(self)] if self.trials.left_s > 0 else []
            self.trials.entries += more
            pool = [self.best, *more] if more else []
        if self.trials.left_s <= 0:
            self.best = self.trials.most_likely()
        return Phase.WATCH

    def _watch(self) -> Generator[Entry, float, Phase]:
        if self._drift is None:
            return Phase.KEEP
        usual_s = self.best.median_s
        # Another search is worthwhile with a quarter of the budget left.
        least_left_s = SHARE * STEPS / 4 * usual_s
        while True:
            window = []
            for _ in range(WINDOW):
                window.append((yield self.best))
            if self._has_drifted(statistics.median(window), usual_s) and self.trials.left_s > least_left_s:
                return Phase.MEASURE

    def _keep(self) -> Generator[Entry, float, Phase]:
        while True:
            yield self.best

    def _rounds(self, pool: Sequence[Entry]) -> Generator[Entry, float, None]:
        """Halve a pool until one entry is left, which is then `best`."""
        trials = self.trials
        assert self._steps is not None
        while True:
            for entry in pool:
                entry.rounds += 1
            for _ in range(self._steps):
                for entry in list(pool):
                    if not (yield from self._stays(entry)):
                        pool = [left for left in pool if left is not entry]
            pool = [entry for entry in pool if entry.seconds]
            if len(pool) != 2 or not trials.is_undecided(*pool):
                pool = trials.better_half(pool)
            self.best = min(pool or trials.entries, key=lambda entry: entry.median_s)
            if len(pool) <= 1:
                return

    def _stays(self, entry: Entry) -> Generator[Entry, float, bool]:
        """Run a step of a candidate; return whether it stays in its round."""
        trials = self.trials
        if not trials.is_affordable(entry):
            return False
        if entry.first_s is None:
            # The first step of a candidate allocates memory and connects ranks.
            entry.first_s = yield entry
            if math.isfinite(trials.least_s) and trials.left_s <= 0:
                return False
        entry.seconds.append((yield entry))
        return not trials.is_far(entry)

    def _has_drifted(self, seconds: float, before_s: float) -> bool:
        return self._drift is not None and abs(seconds - before_s) > self._drift * before_s


_RUN: Mapping[Phase, Callable[[PlanChooser], Generator[Entry, float, Phase]]] = {
    Phase.PREDICT: PlanChooser._predict,
    Phase.MEASURE: PlanChooser._measure,
    Phase.CONFIRM: PlanChooser._confirm,
    Phase.TRY: PlanChooser._try,
    Phase.WATCH: PlanChooser._watch,
    Phase.KEEP: PlanChooser._keep,
}
