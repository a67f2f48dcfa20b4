"""Choose a plan during training by predicted or measured step times, and choose again when step times drift.

    chooser = PlanChooser(source)
    for batch in batches:
        with chooser:
            ...  # a whole step, which follows chooser.current_candidate

Trials are rounds of successive halving: all remaining candidates run a few steps, interleaved, and the half with the
smaller medians stays. The time lost to slower plans is bounded (`candidates.TRIAL_BUDGET_SHARE`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.candidates import (
    MIN_BUDGET_STEPS,
    OFF_FAMILY,
    TRIAL_BUDGET_SHARE,
    CandidateTimes,
    PlanCandidate,
    Trials,
    TriedPlan,
)
from fusedmoe.schedule.plan import Plan

#: Steps per window. A window's median is compared with the plan's time when it was chosen.
WINDOW_STEPS = 10

# Additional rounds between the best plan and the plan with the lowest median.
_MAX_REMATCHES = 4
# First steps of a job that are not counted.
_NUM_IGNORED_STEPS = 2
# `PlanChooser.describe_choice` reports noise above this fraction.
_REPORTED_NOISE = 0.1


class Phase(Enum):
    """Phase of a `PlanChooser`; the value describes it."""

    PREDICT = "make candidates from costs; ends before the next step"
    MEASURE = "the next steps measure costs while they follow the best plan so far"
    CONFIRM = "steps follow an earlier job's choice, and the runner-up"
    TRY = "steps follow candidates, interleaved"
    WATCH = "steps follow the chosen plan; the median of each window is compared"
    KEEP = "steps follow the chosen plan; their times are ignored"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREDICT: frozenset({Phase.MEASURE, Phase.CONFIRM, Phase.TRY, Phase.KEEP}),
    Phase.MEASURE: frozenset({Phase.PREDICT}),
    Phase.CONFIRM: frozenset({Phase.WATCH, Phase.MEASURE}),
    Phase.TRY: frozenset({Phase.WATCH}),
    Phase.WATCH: frozenset({Phase.MEASURE, Phase.KEEP}),
    Phase.KEEP: frozenset(),
}


class PlanSource:
    """Make plans for a `PlanChooser` and apply them. Subclasses override the methods they support.

    All ranks call a method in the same step, and it must return the same result on all ranks. Only the argument of
    `max_over_ranks` differs between ranks.
    """

    @property
    def has_costs(self) -> bool:
        """True if candidates can be predicted. Otherwise the chooser first calls `measure`."""
        return True

    def candidates(self) -> Sequence[PlanCandidate]:
        """Return the initial candidates, at least one, most promising first."""
        return [PlanCandidate(OFF_FAMILY, Plan(), False, math.inf)]

    def load_earlier_choice(self) -> tuple[float, Sequence[PlanCandidate]] | None:
        """Return an earlier job's choice: its seconds per step, and its plan followed by alternatives."""
        return None

    def make_further_candidates(self, chooser: PlanChooser) -> Sequence[PlanCandidate]:
        """Return further candidates to compare with the best so far. An empty sequence ends the search."""
        return ()

    def measure(self, chooser: PlanChooser, budget_s: float) -> float | None:
        """Measure costs in at most `budget_s`. Returns the seconds spent; None: call again after the next step."""
        return 0.0

    def follow(self, candidate: PlanCandidate) -> None:
        """Apply the candidate's plan to all later steps."""

    def max_over_ranks(self, seconds: list[float]) -> list[float]:
        """Return the element-wise maximum over ranks."""
        return seconds

    def report(self, chooser: PlanChooser) -> None:
        """Called when trials end with a choice; a choice with `trials.is_too_noisy` was not made by measurement."""

    def guard(self) -> AbstractContextManager[None]:
        """Return a context for calls after a step, in which a failure must stop all ranks (`Topology.guard`)."""
        return nullcontext()

    def completion_time_s(self, chooser: PlanChooser) -> float:
        """Return the time at which all work launched so far is complete."""
        return time.perf_counter()


class PlanChooser:
    """Choose a plan by prediction, or by measured step times. The choice is equal on all ranks.

    One state machine (`Phase`, `TRANSITIONS`)::

        PREDICT ──> TRY ───────> WATCH ── drift ──> MEASURE ──> PREDICT
           │                       └── drift=None ──> KEEP
           ├──────> CONFIRM ───> WATCH, or MEASURE if the time of the earlier choice has changed
           ├──────> MEASURE      without costs
           └──────> KEEP         by prediction alone (steps=None)

    A candidate that is much slower than the best, by prediction or in its first step, is dropped. Of plans that are
    equally fast within the noise, the plan with the fewest tasks is chosen. If step times are too noisy to rank plans,
    the plan with the best prediction is chosen, or the earlier job's choice is kept. Trials cost at most 2% of 500
    steps, or of all steps if there are more.

    Args:
        steps: steps of each candidate per round; None: keep the first candidate without trials.
        drift: relative change of the median step time that starts another search; None: never.
    Attributes:
        best: the fastest entry so far; the chosen one if `is_settled`.
        trials: step times of all candidates.
    Raises:
        ConfigError: no candidate, or `steps` or `drift` is not positive.
    """

    def __init__(self, source: PlanSource, *, steps: int | None = 2, drift: float | None = 0.1) -> None:
        if (steps is not None and steps < 1) or (drift is not None and drift <= 0):
            raise ConfigError(
                f"PlanChooser: steps = {steps} must be at least 1 or None, and drift = {drift} above 0 or None"
            )
        self.source, self.trials, self.phase = source, Trials(), Phase.PREDICT
        self.best = CandidateTimes(PlanCandidate(OFF_FAMILY, Plan(), False, math.inf))  # until the first prediction
        self._steps_per_round, self._max_drift = steps, drift
        self._earlier_choice_s = math.inf
        self._window_times_s: list[float] = []
        self._skips_next_step = False
        self._step_start_s = 0.0
        self._applied_candidate: PlanCandidate | None = None
        # A string: an exception would keep the caller's frames and their tensors alive.
        self._failure_text = ""
        self._phase_generator = self._run_phases()
        self._current_entry = next(self._phase_generator)
        self._apply_current_plan()

    @property
    def current_candidate(self) -> PlanCandidate:
        return self._current_entry.candidate

    @property
    def plan(self) -> Plan:
        """Plan of the next step; without tasks: unchunked layers."""
        return self.current_candidate.plan

    @property
    def is_settled(self) -> bool:
        return self.phase in (Phase.WATCH, Phase.KEEP)

    def note(self, seconds: float) -> None:
        """Record this rank's time of a whole step, in seconds. Collective in some steps.

        Raises `ConfigError` if the time is not positive and finite, or if an earlier failure of the source ended the
        search.
        """
        if self._failure_text:
            raise ConfigError(
                f"PlanChooser.note: the search failed in an earlier step: {self._failure_text}. Make a new PlanChooser."
            )
        if self._skips_next_step:
            self._skips_next_step = False
            return
        if self.phase is Phase.KEEP:
            return
        self._window_times_s.append(seconds)
        # Once settled, ranks exchange their times once per window.
        if self.is_settled and len(self._window_times_s) < WINDOW_STEPS:
            return
        was_settled, is_valid = self.is_settled, True
        try:
            with self.source.guard():
                window, self._window_times_s = self._window_times_s, []
                slowest = self.source.max_over_ranks(window)
                is_valid = all(0 < step_s < math.inf for step_s in slowest)
                if not is_valid:
                    raise ConfigError(f"PlanChooser.note: step time {slowest} s must be positive and finite")
                for step_s in slowest:
                    self.trials.num_steps += 1
                    self._current_entry = self._phase_generator.send(step_s)
                self._apply_current_plan()
        except BaseException as error:
            # The failing rank's generator has ended. Other ranks must not continue theirs.
            if is_valid:
                self._failure_text = f"{type(error).__name__}: {error}"
            raise
        if self.is_settled and not was_settled:
            self.source.report(self)

    def skip(self) -> None:
        """Ignore the next step passed to `note`, for example after a checkpoint. Call on every rank."""
        # Work left on one rank delays the next step of all.
        self._skips_next_step = True

    def __enter__(self) -> PlanChooser:
        self._step_start_s = self.source.completion_time_s(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Other ranks may never complete a step that failed here.
        if kind is None:
            self.note(self.source.completion_time_s(self) - self._step_start_s)

    def table(self) -> list[TriedPlan]:
        """Return a row for each candidate, fastest first."""
        rows = []
        for entry in self.trials.entries:
            measured_s = entry.median_s if entry.step_times_s else None
            name, predicted_s = entry.candidate.name, entry.candidate.predicted_s
            rows.append(TriedPlan(name, predicted_s, measured_s, len(entry.step_times_s), entry.rounds))
        return sorted(rows, key=lambda row: row.measured_s or math.inf)

    def describe_choice(self) -> str:
        """Describe the best plan so far and its advantage over other plans."""
        trials, best = self.trials, self.best
        has_families = len({entry.candidate.family for entry in trials.entries}) > 1
        others: dict[str, CandidateTimes] = {}
        for entry in sorted(trials.entries, key=lambda entry: entry.median_s):
            if entry.step_times_s and entry is not best:
                others.setdefault(entry.candidate.family if has_families else entry.candidate.name, entry)
        named = [(name, entry) for name, entry in others.items() if name != best.candidate.family]
        shown = [*named[:2], *(pair for pair in named[2:] if pair[0] == OFF_FAMILY)]
        than = ", ".join(f"{name} {entry.median_s:.3g} s ({self._describe_comparison(entry)})" for name, entry in shown)
        # With high noise, predictions may decide.
        unsure = f" (noise {trials.noise:.0%} per step)" if trials.noise > _REPORTED_NOISE else ""
        first = f"schedule: {best.candidate.name}: {best.median_s:.3g} s per step"
        last = f"{trials.num_tried} steps tried, {trials.spent_s:.2g} s spent{unsure}"
        plan = best.candidate.plan
        offs = [entry for entry in trials.entries if entry.candidate.family == OFF_FAMILY and entry.step_times_s]
        is_idle = len(plan) > 0 and not plan.overlaps and all(map(self._is_within_spread, offs))
        idle = 'it overlaps nothing: schedule "off" is equivalent' if is_idle else ""
        return "; ".join(filter(None, (first, than, self._describe_choice_reason(), idle, last)))

    def _describe_choice_reason(self) -> str:
        """State why the best plan runs although another plan has a lower median, or `off` is as fast; else ""."""
        best, tried = self.best, [entry for entry in self.trials.entries if entry.step_times_s]
        name, predicted_s = best.candidate.family, best.candidate.predicted_s
        if self.trials.is_too_noisy:
            is_predicted = predicted_s <= min(entry.candidate.predicted_s for entry in self.trials.plausible_entries)
            reason = "prediction" if is_predicted else "an earlier choice"
            return f"measurements are too noisy to choose; running {name} by {reason}"
        least = min(tried, key=lambda entry: entry.median_s, default=best)
        is_off_as_fast = any(entry.candidate.family == OFF_FAMILY and self._is_within_spread(entry) for entry in tried)
        gain = "no gain over off measurable; " if is_off_as_fast and name != OFF_FAMILY else ""
        if best.median_s <= least.median_s:
            return f"{gain}{name} runs by its lower median" if gain else ""
        if len(best.candidate.plan) < len(least.candidate.plan) and self.trials.is_as_fast(best, least):
            return f"{gain}{name} runs because it has fewer tasks"
        # `likely_fastest` weighs predictions; otherwise the last comparison of two plans decided.
        reason = "better prediction" if predicted_s < least.candidate.predicted_s else "last comparison"
        return f"{gain}{name} runs by its {reason}"

    def _is_within_spread(self, entry: CandidateTimes) -> bool:
        return abs(entry.median_s / self.best.median_s - 1) <= 2 * self.trials.noise_between(entry, self.best)

    def _describe_comparison(self, entry: CandidateTimes) -> str:
        spread = 2 * self.trials.noise_between(entry, self.best)
        within = f", within the spread of {spread:.0%}" if self._is_within_spread(entry) else ""
        return f"{entry.median_s / self.best.median_s - 1:+.0%}{within}"

    def _apply_current_plan(self) -> None:
        # Applying a plan is collective and slow; most steps keep the plan.
        if self.current_candidate is not self._applied_candidate:
            self.source.follow(self.current_candidate)
            self._applied_candidate = self.current_candidate

    def _run_phases(self) -> Generator[CandidateTimes, float, None]:
        """Run phase after phase. Yields the entry of the next step, receives its seconds."""
        while True:
            self._enter_phase((yield from _PHASE_METHODS[self.phase](self)))

    def _enter_phase(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase

    def _predict_candidates(self) -> Generator[CandidateTimes, float, Phase]:
        yield from ()  # no step
        if not self.source.has_costs:
            return Phase.MEASURE
        is_first = not self.trials.entries
        if (
            is_first
            and self._steps_per_round is not None
            and (earlier := self.source.load_earlier_choice()) is not None
        ):
            self._earlier_choice_s, candidates = earlier
            self.trials.begin_search(candidates)
            self.best = self.trials.entries[0]
            return Phase.CONFIRM
        before = [] if is_first else [self.best.candidate]
        known = [(candidate.plan, candidate.uses_micro_batches) for candidate in before]
        made = [new for new in self.source.candidates() if (new.plan, new.uses_micro_batches) not in known]
        if not before and not made:
            raise ConfigError("PlanChooser: no candidate can run on this topology")
        self.trials.begin_search([*before, *made])
        self.best = self.trials.entries[0]
        return Phase.TRY if self._steps_per_round is not None else Phase.KEEP

    def _measure_costs(self) -> Generator[CandidateTimes, float, Phase]:
        usual_s = self.best.median_s
        while (took_s := self.source.measure(self, max(0.0, self.trials.remaining_s / 2))) is None:
            self.trials.charge_budget(max(0.0, (yield self.best) - usual_s))
        self.trials.charge_budget(took_s)
        return Phase.PREDICT

    def _confirm_earlier_choice(self) -> Generator[CandidateTimes, float, Phase]:
        first = self.trials.entries[0]
        yield from self._run_halving_rounds(self.trials.entries)
        if self.trials.is_too_noisy:
            # Such medians show no drift either.
            plausible = self.trials.plausible_entries
            self.best = first if first in plausible else min(plausible, key=lambda entry: entry.candidate.predicted_s)
            return Phase.WATCH
        return Phase.MEASURE if self._has_drifted(first.median_s, self._earlier_choice_s) else Phase.WATCH

    def _try_candidates(self) -> Generator[CandidateTimes, float, Phase]:
        pool = list(self.trials.entries)
        # The first candidate runs the job's first steps, which do not count.
        for _ in range(_NUM_IGNORED_STEPS):
            pool[0].first_step_s = yield pool[0]
        while pool:
            yield from self._run_halving_rounds(pool)
            # The best may be an outlier.
            for _ in range(_MAX_REMATCHES):
                least = min(self.trials.entries, key=lambda entry: entry.median_s)
                if self.trials.is_as_fast(self.best, least):
                    break
                yield from self._run_halving_rounds([self.best, least])
            more = (
                [CandidateTimes(new) for new in self.source.make_further_candidates(self)]
                if self.trials.remaining_s > 0
                else []
            )
            self.trials.entries += more
            pool = [self.best, *more] if more else []
        if self.trials.is_too_noisy:
            self.best = min(self.trials.plausible_entries, key=lambda entry: entry.candidate.predicted_s)
        elif self.trials.remaining_s <= 0:
            self.best = self.trials.likely_fastest()
        return Phase.WATCH

    def _watch_for_drift(self) -> Generator[CandidateTimes, float, Phase]:
        if self._max_drift is None:
            return Phase.KEEP
        usual_s = self.best.median_s
        # Search again only with at least a quarter of the budget left.
        least_left_s = TRIAL_BUDGET_SHARE * MIN_BUDGET_STEPS / 4 * usual_s
        while True:
            window = []
            for _ in range(WINDOW_STEPS):
                window.append((yield self.best))
            if self._has_drifted(statistics.median(window), usual_s) and self.trials.remaining_s > least_left_s:
                return Phase.MEASURE

    def _keep_best_plan(self) -> Generator[CandidateTimes, float, Phase]:
        while True:
            yield self.best

    def _run_halving_rounds(self, pool: Sequence[CandidateTimes]) -> Generator[CandidateTimes, float, None]:
        """Halve a pool until one entry is left. Updates `best`."""
        trials = self.trials
        assert self._steps_per_round is not None
        while True:
            for entry in pool:
                entry.rounds += 1
            for _ in range(self._steps_per_round):
                for entry in list(pool):
                    if not (yield from self._run_step(entry)):
                        pool = [left for left in pool if left is not entry]
            pool = [entry for entry in pool if entry.step_times_s]
            if len(pool) != 2 or not trials.is_undecided(*pool):
                pool = trials.faster_half(pool)
            self.best = min(pool or trials.entries, key=lambda entry: entry.median_s)
            if len(pool) <= 1:
                return

    def _run_step(self, entry: CandidateTimes) -> Generator[CandidateTimes, float, bool]:
        """Run one step of a candidate. Returns whether it stays in the current round."""
        trials = self.trials
        if not trials.is_affordable(entry):
            return False
        if entry.first_step_s is None:
            # The first step of a candidate allocates memory and connects ranks.
            entry.first_step_s = yield entry
            if math.isfinite(trials.best_median_s) and trials.remaining_s <= 0 and not trials.must_run(entry):
                return False
        entry.step_times_s.append((yield entry))
        return not trials.is_too_slow(entry)

    def _has_drifted(self, seconds: float, before_s: float) -> bool:
        return self._max_drift is not None and abs(seconds - before_s) > self._max_drift * before_s


_PHASE_METHODS: Mapping[Phase, Callable[[PlanChooser], Generator[CandidateTimes, float, Phase]]] = {
    Phase.PREDICT: PlanChooser._predict_candidates,
    Phase.MEASURE: PlanChooser._measure_costs,
    Phase.CONFIRM: PlanChooser._confirm_earlier_choice,
    Phase.TRY: PlanChooser._try_candidates,
    Phase.WATCH: PlanChooser._watch_for_drift,
    Phase.KEEP: PlanChooser._keep_best_plan,
}
