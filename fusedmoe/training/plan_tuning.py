"""The fastest plan of a training step, found by measuring while a model trains: no plan changes a result.

    tuning = PlanTuning(model, topology, "auto", None, workload)
    for batch in batches:
        began = time.perf_counter()
        loss = model(batch)
        tuning.buckets.open()
        loss.backward()
        sync_gradients(model, topology, buckets=tuning.buckets)
        …
        tuning.note(time.perf_counter() - began)

FlowMoE's tuning (§4.3) is a case of it, in which the candidates are numbers of micro-batches R, and with the best of
them sizes S_p of buckets (`BucketSearch`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.collectives import slowest_s
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.cache import choice_text, write
from fusedmoe.runtime.profiler import BUDGET_S
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.tuning import (
    OFF,
    WINDOW,
    Contest,
    Entry,
    PlanCandidate,
    candidates_beside,
    degrees_beside,
    with_bucket_bytes,
)
from fusedmoe.schedule.workload import Workload
from fusedmoe.training.copies import MpLoss
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.step_plan import AUTO, PlannedStep

#: The policies that measure: all families, and FlowMoE's with R and S_p.
TUNED = (AUTO, "flowmoe")

# So often plans beside the best one are tried, and steps with each size of buckets in a round: as many again are done
# with the best size so far, ten in all, as in the paper.
_CLIMBS, _SIZE_STEPS = 3, 5
# In less time costs are not measured again: it would not tell much.
_LEAST_S = 1.0
# A line says how much steps differ, where it is more than this.
_UNSURE = 0.1

# Sizes that may be tried, evenly in their logarithm, and the least of them as a share of the largest.
_GRID, _LEAST = 256, 2**-6
# Gain that an expected improvement is counted from, in units of the spread of what was measured; as in the paper.
_EXPLORATION = 0.1


class TriedPlan(NamedTuple):
    """A line of the table of what was measured; `measured_s`: the median, None where a plan was not tried."""

    name: str
    predicted_s: float
    measured_s: float | None
    steps: int
    rounds: int


class PlanTuning:
    """Has a model follow one plan after the other while it trains, and keeps to the fastest.

    All ranks follow the same plan at all times, and the slowest rank's seconds count. The steps tried cost 2% of 500
    steps, or of all where they are more, at most. What was found is kept on disk, and the next job begins with it.
    Steps that get longer or shorter by more than `drift` begin it anew: first costs that were measured are measured
    again, for half of the time that may still be spent, and then all that was chosen is chosen again. Nothing of this
    belongs into a checkpoint.

    Args:
        model, topology, costs, workload, limit, mp_loss, blocks, samples: as for `plan_step`. Given costs stay.
        policy: "auto", or "flowmoe", whose plan then has the best number of micro-batches and size of gradient buckets.
        drift: None: never.
        measure: measures the costs again after a drift, for about so many seconds as it is told, in place of what
            `costs=None` does; costs that are given were then measured so. Collective over all ranks, and the same on
            all of them. None: not now, it is asked again after the next step.
        resumed: the file of a choice (`choice_text`) that this job made before it was stopped: where it is there, its
            plan is followed without any other, unless steps drift.
        tell: is told on rank 0 what was chosen, in a line.
    Attributes:
        now: what steps follow.   buckets: of gradients, for `sync_gradients`.
    Raises:
        ConfigError: another policy; for "flowmoe" no scikit-learn (`fusedmoe[plan]`); what `plan_step` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        policy: str,
        costs: CostModel | StepCosts | None,
        workload: Workload,
        *,
        limit: int = MAX_DEGREE,
        mp_loss: MpLoss = "summands",
        blocks: PipelinedBlocks | None = None,
        samples: int | None = None,
        drift: float | None = 0.1,
        measure: Callable[[float], CostModel | StepCosts | None] | None = None,
        resumed: Path | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        if policy not in TUNED:
            raise ConfigError(f"PlanTuning measures for {' and '.join(TUNED)}; plan_step has a model follow {policy!r}")
        step = PlannedStep(
            model, topology, costs, workload, limit=limit, mp_loss=mp_loss, blocks=blocks, samples=samples
        )
        self._step, self._policy, self._tell = step, policy, tell
        self.buckets: GradientBuckets = step.buckets
        self._path = step.choice_path(policy)
        kept = None if resumed is None else step.kept(policy, resumed)
        # The job's own choice stands without a rival, so that it goes on by the plan that it was stopped with.
        kept = step.kept(policy, self._path) if kept is None else (kept[0], kept[1][:1])
        self._measure = step.measured if measure is None and costs is None else measure
        self._search: BucketSearch | None = None
        self._climbs, self._climbed, self._sizes = 0, set[str](), False
        if policy == AUTO:
            self.contest = Contest(self._families, self._beside, kept=kept, drift=drift, renew=self._renew)
        else:
            # Where no gradient travels, sizes of buckets are nothing to search.
            if largest := max(step.costs.gradient_bytes):
                self._search = BucketSearch(largest)
            given = self._first_split, self._next_split
            self.contest = Contest(*given, kept=kept, steps=_SIZE_STEPS, drift=drift, renew=self._renew)
        self._own: list[float] = []
        self._said = self._skips = False
        self.now: PlanCandidate
        self._followed: PlanCandidate | None = None
        self._follow()

    @property
    def plan(self) -> Plan:
        """The plan that steps follow now; without tasks: nothing in chunks."""
        return self.now.plan

    @property
    def costs(self) -> StepCosts:
        """Costs of a step by the plan that is followed now."""
        return self._step.costs_of(self.now.whole)

    @property
    def settled(self) -> bool:
        """Tells that a plan is chosen."""
        return self.contest.settled

    def note(self, seconds: float) -> None:
        """Takes the seconds of a whole step on this rank. Collective over all ranks, but not in every step."""
        if self._skips:  # on every rank, so that they go on counting the same steps
            self._skips = False
            return
        self._own.append(seconds)
        # Once a plan is chosen ranks only watch for drift: they exchange a window of steps at a time.
        if self.contest.settled and len(self._own) < WINDOW:
            return
        topology = self._step.topology
        with topology.guard("PlanTuning.note"):
            took, self._own = self._own, []
            # All ranks wait for the slowest, so its seconds are the step's.
            slowest = slowest_s(topology.world, took, "the longest step of all ranks")
            if not all(0 < step_s < math.inf for step_s in slowest):
                raise ConfigError(f"PlanTuning.note: a step took {slowest} s; give its seconds, more than 0")
            for step_s in slowest:
                self.contest.note(step_s)
            self._follow()
        if self.contest.settled and not self._said:
            self._keep()
        self._said = self.contest.settled

    def skip(self) -> None:
        """Leaves the next step that is noted out: call it on every rank after what is no step, a checkpoint, say."""
        # What some rank still does then, others wait for in their next step.
        self._skips = True

    def table(self) -> list[TriedPlan]:
        """Lists what was tried and measured, the fastest first."""
        rows = []
        for one in self.contest.entries:
            measured_s = one.median_s if one.seconds else None
            made, predicted_s = one.candidate.name, one.candidate.predicted_s
            rows.append(TriedPlan(made, predicted_s, measured_s, len(one.seconds), one.rounds))
        return sorted(rows, key=lambda row: row.measured_s or math.inf)

    def line(self) -> str:
        """Describes the best plan so far, and by how much it is faster."""
        contest, best = self.contest, self.contest.best
        others: dict[str, Entry] = {}
        for one in sorted(contest.entries, key=lambda one: one.median_s):
            if one.seconds and one is not best:
                others.setdefault(one.candidate.name if self._search else one.candidate.family, one)
        named = [(name, one) for name, one in others.items() if name != best.candidate.family]
        shown = [*named[:2], *(pair for pair in named[2:] if pair[0] == OFF)]
        than = ", ".join(
            f"{name} {one.median_s:.3g} s ({one.median_s / best.median_s - 1:+.0%})" for name, one in shown
        )
        # Then predictions may count for more than what was measured.
        unsure = f" (steps differ by {contest.noise:.0%} by chance)" if contest.noise > _UNSURE else ""
        first = f"schedule: {best.candidate.name}: {best.median_s:.3g} s a step"
        last = f"{contest.tried} steps tried, {contest.spent_s:.2g} s spent{unsure}"
        return "; ".join(filter(None, (first, than, last)))

    def choice(self) -> str:
        """Writes the text of a file that a job which goes on with this one is given as `resumed`."""
        best = self.contest.best
        ranked = sorted((one for one in self.contest.entries if one.seconds), key=lambda one: one.median_s)
        second = [one.candidate for one in ranked if one is not best][:1]
        rows = [row._asdict() for row in self.table()]
        return choice_text(self.line(), best.median_s, [best.candidate, *second], rows)

    def _keep(self) -> None:
        if self._step.topology.is_first:
            write(self._path, self.choice(), "what was measured")
            self._tell(self.line())

    def _follow(self) -> None:
        candidate = self.contest.now.candidate
        # Following a plan is collective and takes a while: not in each of the hundreds of steps that keep to one.
        if candidate is not self._followed:
            self._step.follow(candidate)
            self._followed = self.now = candidate

    def _renew(self, left_s: float) -> float | None:
        """Measures the costs again, as `Contest` asks. Collective over all ranks."""
        if self._measure is None or left_s < _LEAST_S:
            return 0.0
        began_s = time.perf_counter()
        costs = self._measure(min(left_s, BUDGET_S))
        if costs is None:
            return None
        self._step.set_costs(costs)
        # What was predicted by the costs before says nothing beside what is predicted now. New objects are also
        # followed anew: measuring may have had the layers follow plans of its own.
        for entry in self.contest.entries:
            entry.candidate = self._step.predicted(entry.candidate)
        took_s = time.perf_counter() - began_s
        return slowest_s(self._step.topology.world, [took_s], "the time to measure costs in")[0]

    def _families(self) -> list[PlanCandidate]:
        self._climbs, self._climbed = 0, set()
        return self._step.candidates()

    def _beside(self, entries: Sequence[Entry]) -> list[PlanCandidate]:
        """Lists plans beside the best one that were not tried."""
        best = self.contest.best.candidate
        # A few climbs, and none from where one has been: each costs steps by plans that are slower.
        self._climbs += 1
        if self._climbs > _CLIMBS or best.name in self._climbed:
            return []
        self._climbed.add(best.name)
        tried = {(one.candidate.plan.fingerprint, one.candidate.whole) for one in entries}
        costs = self._step.costs_of(best.whole)
        beside = candidates_beside if self._policy == AUTO else degrees_beside
        found = beside(best, costs, self._step.limit, self._step.samples)
        return [one for one in found if (one.plan.fingerprint, one.whole) not in tried and self._step.runs(one)]

    def _first_split(self) -> list[PlanCandidate]:
        self._climbs, self._climbed, self._sizes = 0, set(), False
        return [self._step.candidate(self._policy)]

    def _next_split(self, entries: Sequence[Entry]) -> list[PlanCandidate]:
        """Lists other numbers of micro-batches, and once there are none to try, the next size of buckets."""
        if not self._sizes and (found := self._beside(entries)):
            return found
        return self._next_size(entries)

    def _next_size(self, entries: Sequence[Entry]) -> list[PlanCandidate]:
        if self._search is None:
            return []
        best = self.contest.best
        measured = best.median_s / best.candidate.predicted_s  # of what was too far off to be tried, by prediction
        # Points of the search are steps with as many micro-batches; its first one is drawn, as in the paper.
        alike = [entry for entry in entries if entry.candidate.plan.degrees == best.candidate.plan.degrees]
        self._search.tried = [
            (largest, entry.median_s if entry.seconds else measured * entry.candidate.predicted_s)
            for entry in (alike if self._sizes else ())
            if (largest := entry.candidate.plan.largest_bucket)
        ]
        self._sizes = True
        size = self._search.next()
        found = [] if size is None else [with_bucket_bytes(best.candidate, self._step.costs, size)]
        return [one for one in found if self._step.runs(one) and one.plan not in [e.candidate.plan for e in entries]]


@dataclass
class BucketSearch:
    """Proposes S_p, the bytes of a gradient bucket, by Bayesian optimisation of step time (FlowMoE §4.3).

    The seconds that steps take with a size are a point of a Gaussian process over sizes, and the size with the largest
    expected improvement is tried next.

        while (size := search.next()) is not None:
            search.tried.append((size, seconds(size)))

    Args:
        largest_bytes: of a layer's gradient, in bytes: the range is (0, largest_bytes].
        samples: sizes that are tried, the first at random.
        seed: of the first size. The same on every rank, as must be the seconds: then all ranks have the same sizes.
    Attributes:
        tried: (bytes, seconds) so far, in no matter which order.
    Raises:
        ConfigError: numbers that are not positive, or no scikit-learn (`fusedmoe[plan]`).
    """

    largest_bytes: int
    samples: int = 8
    seed: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if min(self.largest_bytes, self.samples) < 1:
            raise ConfigError(
                f"tuning S_p needs largest_bytes = {self.largest_bytes} and samples = {self.samples} of at least 1"
            )
        if find_spec("sklearn") is None:  # told now, and not when the second size is to be chosen
            raise ConfigError("tuning S_p needs scikit-learn: pip install 'fusedmoe[plan]'")
        self._chance = np.random.default_rng(self.seed)

    def next(self) -> int | None:
        """Returns the size to try now, or None where `samples` were tried."""
        if len(self.tried) >= self.samples:
            return None
        if not self.tried:
            return max(1, round(self.largest_bytes * float(self._chance.uniform())))
        return self._most_promising()

    def _most_promising(self) -> int:
        """Returns the size with the largest expected improvement, of those that were not tried."""
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        bytes_, seconds = (np.array(column, dtype=float) for column in zip(*self.tried, strict=True))
        spread = seconds.std() or 1.0
        values = (seconds - seconds.mean()) / spread
        # Matérn 5/2: times bend where buckets begin to fill the link, but do not jump. White noise: steps differ.
        kernel = Matern(length_scale=0.3, length_scale_bounds=(0.02, 3.0), nu=2.5) + WhiteKernel(1e-3, (1e-6, 1e-1))
        process = GaussianProcessRegressor(kernel, random_state=self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few points do not always say how smooth they are
            process.fit(self._place(bytes_), values)
        least = max(1.0, self.largest_bytes * _LEAST)
        sizes = np.unique(np.ceil(np.geomspace(least, self.largest_bytes, _GRID)).astype(int))
        sizes = sizes[~np.isin(sizes, bytes_)]
        if not len(sizes):
            return int(bytes_[seconds.argmin()])
        mean, std = process.predict(self._place(sizes.astype(float)), return_std=True)
        # Expected improvement, E[max(0, best - f - exploration)] of a normal f.
        gain = values.min() - mean - _EXPLORATION
        z = gain / np.maximum(std, 1e-12)
        return int(sizes[(gain * norm.cdf(z) + std * norm.pdf(z)).argmax()])

    def _place(self, bytes_: np.ndarray) -> np.ndarray:
        """Places sizes between nothing and the largest, [n, 1], by the number of buckets that they make."""
        return np.log(bytes_ / self.largest_bytes)[:, None]
