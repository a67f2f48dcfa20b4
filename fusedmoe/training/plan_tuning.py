"""The fastest plan of a training step, chosen by measuring while a model trains. Results do not depend on the plan.

    step = PlannedStep(model, topology, None, workload)
    tuning = tune_step(step, "auto")
    for batch in batches:
        with tuning:
            loss = model(batch)
            step.buckets.open()
            loss.backward()
            sync_gradients(model, topology, buckets=step.buckets)
            ...

Models of Hugging Face, torchtitan and Megatron need `tune_model(model)` alone.

FlowMoE's tuning (§4.3) is a special case. Its candidates are numbers of micro-batches R, and with the best of them
sizes S_p of buckets (`BucketSearch`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fusedmoe.comm.collectives import slowest_s
from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_of
from fusedmoe.runtime.cache import choice_text, write
from fusedmoe.runtime.profiler import BUDGET_S
from fusedmoe.schedule.candidates import PlanCandidate, candidates_beside, degrees_beside, with_bucket_bytes
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan_chooser import PlanChooser, PlanSource
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.training.step_plan import AUTO, PlannedStep

#: The policies that measure: all families, and FlowMoE's with R and S_p.
TUNED = (AUTO, "flowmoe")

# Searches near the best plan, and steps with each size of buckets in a round: with as many steps of the best size so
# far ten in all, as in the paper.
_CLIMBS, _SIZE_STEPS = 3, 5
# Costs measured in less time would not be accurate enough.
_LEAST_S = 1.0
# Steps that may pass without a measurement after a drift: a forward may reach the layer no more.
_MOST_DEFERRED = 2

# Sizes that may be tried, evenly in their logarithm, and the least of them as a share of the largest.
_GRID, _LEAST = 256, 2**-6
# Gain that an expected improvement is counted from, in units of the spread of what was measured; as in the paper.
_EXPLORATION = 0.1

Measure = Callable[[float], CostModel | StepCosts | None]


def tune_step(
    step: PlannedStep,
    policy: str = AUTO,
    *,
    drift: float | None = 0.1,
    measure: Measure | None = None,
    resumed: Path | None = None,
    tell: Callable[[str], None] = print,
) -> PlanChooser:
    """Make a `PlanChooser` for the steps of a model. Collective over all ranks.

    All ranks follow the same plan in each step, and the slowest rank's seconds count. The choice is cached on disk, and
    the next job begins with it. After a drift costs that were measured are measured again, in half of the budget that
    is left, and the search starts again. None of this belongs into a checkpoint.

    Args:
        policy: "auto", or "flowmoe", which chooses the number of micro-batches and the size of gradient buckets.
        drift: share by which the median of steps must change for another search; None: never.
        measure: measures the costs again, in about the given number of seconds; collective, and the same on all ranks.
            None: only costs that `PlannedStep` has measured are measured again. Returning None defers the measurement
            to the end of the next step. After two such steps the search continues with the previous costs, if any.
        resumed: the file of a choice (`choice_text`) that this job made before it was stopped. If it exists, its plan
            is followed without a trial unless steps drift.
        tell: called on rank 0 with a line that describes each choice.
    Raises:
        ConfigError: another policy; for "flowmoe" no scikit-learn (`fusedmoe[plan]`).
    """
    if policy not in TUNED:
        raise ConfigError(f"tune_step measures for {' and '.join(TUNED)}; plan_step has a model follow {policy!r}")
    measure = step.measured if measure is None and step.has_measured else measure
    source = StepSource(step, policy, tell, measure, resumed)
    return PlanChooser(source, steps=2 if policy == AUTO else _SIZE_STEPS, drift=drift)


def tune_model(
    model: nn.Module,
    *,
    limit: int = MAX_DEGREE,
    drift: float | None = 0.1,
    tell: Callable[[str], None] = print,
) -> PlanChooser:
    """Make a `PlanChooser` for a model of Hugging Face, torchtitan or Megatron: `with` it around each training step.

    The first step follows no plan and measures costs, once for each machine. After a drift the next step measures them
    again. Ranks that share experts choose together; each such group of ranks chooses by its own seconds.

    Args:
        model: with `fusedmoe.hf`, `.titan.routed_experts` or `.megatron` in it. The chosen plans override schedules of
            its layers. The same on every rank, as is the number of steps.
        limit: the largest number of chunks.
        drift, tell: as for `tune_step`.
    Raises:
        ConfigError: a model without such layers.
        RankError: from a step: ranks that come to different plans.
    """
    exchanges = exchanges_of(model)
    if not exchanges:
        raise ConfigError(
            "tune_model: the model has no experts whose tokens fusedmoe.hf, fusedmoe.titan.routed_experts or "
            "fusedmoe.megatron sends. A model of MoELayers has fusedmoe.training.tune_step"
        )
    topology = next((exchange.topology for exchange in exchanges if exchange.topology.size > 1), None)
    if topology is None:
        return PlanChooser(PlanSource(), steps=None)
    return tune_step(PlannedStep(model, topology, None, None, limit=limit), drift=drift, tell=tell)


class StepSource(PlanSource):
    """Plans of a whole training step, which a `PlannedStep` makes and applies; see `tune_step` for the arguments."""

    def __init__(
        self,
        step: PlannedStep,
        policy: str,
        tell: Callable[[str], None],
        measure: Measure | None,
        resumed: Path | None,
    ) -> None:
        self.step = step
        self._policy, self._tell, self._measure, self._resumed = policy, tell, measure, resumed
        self._path = Path()
        # Answers of `measure` in a row that have deferred the measurement.
        self._num_deferred = 0
        self._search: BucketSearch | None = None
        # Without gradients to send there are no sizes of buckets to search.
        if policy != AUTO and step.has_costs and (largest := max(step.costs.gradient_bytes)):
            self._search = BucketSearch(largest)
        self._climbs, self._climbed, self._has_degrees = 0, set[str](), False

    @property
    def has_costs(self) -> bool:
        return self.step.has_costs

    def earlier_choice(self) -> tuple[float, Sequence[PlanCandidate]] | None:
        self._path = self.step.choice_path(self._policy)
        kept = None if self._resumed is None else self.step.kept(self._policy, self._resumed)
        if kept is not None:
            # This job's own choice is not compared with another: the job continues with the plan it was stopped with.
            return kept[0], kept[1][:1]
        return self.step.kept(self._policy, self._path)

    def candidates(self) -> list[PlanCandidate]:
        self._climbs, self._climbed, self._has_degrees = 0, set(), False
        return self.step.candidates() if self._policy == AUTO else [self.step.candidate(self._policy)]

    def more(self, chooser: PlanChooser) -> list[PlanCandidate]:
        """Return plans near the best one; under "flowmoe", once there are none, the next size of buckets."""
        if not self._has_degrees and (near := self._near(chooser)):
            return near
        return [] if self._search is None else self._next_size(self._search, chooser)

    def measure(self, chooser: PlanChooser, budget_s: float) -> float | None:
        if self._measure is None or (budget_s < _LEAST_S and not self._num_deferred):
            return 0.0
        began_s, had_costs = time.perf_counter(), self.has_costs
        costs = self._measure(min(budget_s, BUDGET_S))
        self._num_deferred = 0 if costs is not None else self._num_deferred + 1
        if costs is None:
            if had_costs and self._num_deferred > _MOST_DEFERRED:
                # All ranks count the same steps, so all continue with the previous costs.
                self._num_deferred = 0
                self.step.cancel_measurement()
                return 0.0
            if not had_costs and chooser.trials.num_steps == 1 and self.step.topology.is_first:
                self._tell(
                    "schedule: a step had nothing to measure: compiled blocks and selective activation checkpoints go "
                    "one thing after the other, and plans have no effect there"
                )
            return None
        self.step.set_costs(costs)
        # Predictions by the previous costs are not comparable with new ones. New objects are also followed anew:
        # measuring may have applied plans of its own.
        for entry in chooser.trials.entries:
            entry.candidate = self.step.predicted(entry.candidate)
        return self.slowest([time.perf_counter() - began_s])[0] if had_costs else 0.0

    def follow(self, candidate: PlanCandidate) -> None:
        if self.has_costs:
            self.step.follow(candidate)

    def slowest(self, seconds: list[float]) -> list[float]:
        if not self.has_costs:
            return seconds  # only the number of steps counts
        return slowest_s(self.step.topology.world, seconds, "the longest step of all ranks")

    def report(self, chooser: PlanChooser) -> None:
        if self.step.topology.is_first:
            write(self._path, choice_text(chooser), "what was measured")
            self._tell(chooser.line())

    def guard(self) -> AbstractContextManager[None]:
        return self.step.topology.guard("PlanChooser.note")

    def now_s(self, chooser: PlanChooser) -> float:
        # Device time until a plan is chosen; after that the host does not wait for the device.
        if torch.cuda.is_initialized() and not chooser.settled:
            torch.cuda.synchronize()
        return super().now_s(chooser)

    def _near(self, chooser: PlanChooser) -> list[PlanCandidate]:
        """List plans near the best one that were not tried."""
        best, step = chooser.best.candidate, self.step
        # A few searches, each from another plan: each costs steps by slower plans.
        self._climbs += 1
        if self._climbs > _CLIMBS or best.name in self._climbed:
            return []
        self._climbed.add(best.name)
        entries = chooser.trials.entries
        tried = {(entry.candidate.plan.fingerprint, entry.candidate.whole) for entry in entries}
        beside = candidates_beside if self._policy == AUTO else degrees_beside
        near = beside(best, step.costs_of(best.whole), step.limit, step.samples)
        return [new for new in near if (new.plan.fingerprint, new.whole) not in tried and step.runs(new)]

    def _next_size(self, search: BucketSearch, chooser: PlanChooser) -> list[PlanCandidate]:
        best, entries = chooser.best, chooser.trials.entries
        measured = best.median_s / best.candidate.predicted_s  # of candidates too far off to be tried, by prediction
        # Points of the search are steps with as many micro-batches; its first one is drawn, as in the paper.
        alike = [entry for entry in entries if entry.candidate.plan.degrees == best.candidate.plan.degrees]
        search.tried = [
            (largest, entry.median_s if entry.seconds else measured * entry.candidate.predicted_s)
            for entry in (alike if self._has_degrees else ())
            if (largest := entry.candidate.plan.largest_bucket)
        ]
        self._has_degrees = True
        size = search.next()
        if size is None:
            return []
        new = with_bucket_bytes(best.candidate, self.step.costs, size)
        return [new] if self.step.runs(new) and new.plan not in [entry.candidate.plan for entry in entries] else []


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
