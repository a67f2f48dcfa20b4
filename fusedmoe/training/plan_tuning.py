"""Select the fastest plan of a training step by timing candidates during training. Results do not depend on the plan.

    step = PlannedStep(model, topology)
    tuning = tune_step(step, "auto")
    for batch in batches:
        with tuning:
            loss = model(batch)
            step.buckets.open()
            loss.backward()
            sync_gradients(model, topology, buckets=step.buckets)
            ...

`tune_model(model)` suffices without `fusedmoe.pipeline` and gradient buckets. FlowMoE's tuning (§4.3) selects the
number of micro-batches R, then the bucket size S_p (`BucketSearch`).
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

from fusedmoe.comm.collectives import max_over_ranks_s
from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_in
from fusedmoe.runtime.cache import choice_text, write_or_warn
from fusedmoe.runtime.profiler import BUDGET_S
from fusedmoe.schedule.candidates import PlanCandidate, neighbour_candidates, neighbour_degrees, replace_bucket_bytes
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan_chooser import PlanChooser, PlanSource
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.training.gradient_buckets import moe_layers
from fusedmoe.training.step_plan import AUTO, PlannedStep

#: Policies that are tuned: all families, or FlowMoE with R and S_p.
TUNED_POLICIES = (AUTO, "flowmoe")

# Searches around the best plan; steps per bucket size and round: ten for the best size, as in the paper.
_MAX_SEARCHES, _STEPS_PER_SIZE = 3, 5
# Shorter measurements are inaccurate.
_MIN_MEASUREMENT_S = 1.0
# Steps without a measurement after drift: a forward may not reach the layer again.
_MAX_DEFERRED_STEPS = 2

# Number of candidate sizes; smallest size as a fraction of the largest.
_NUM_SIZES, _MIN_FRACTION = 256, 2**-6
# Exploration offset of the expected improvement, in standard deviations of the times, from the paper.
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
    """Create a `PlanChooser` for a model's training steps. Collective over all ranks.

    All ranks follow the same plan in each step, and the time of the slowest rank counts. The choice is cached on disk
    for later jobs and does not belong in a checkpoint. After drift, if enough of the trial budget (`PlanChooser`) is
    left, the costs are measured again within half of what is left, and the search restarts.

    Args:
        policy: "auto", or "flowmoe", which selects the number of micro-batches and the bucket size.
        drift: relative change of the median step time that restarts the search. None: never.
        measure: measures the costs in about the given number of seconds; collective, same result on all ranks. It is
            called again after the next step if it returns None; with earlier costs, the third None in a row ends the
            measurement and these costs stay. By default, `PlannedStep` repeats its own measurement and keeps costs that
            were passed to it.
        resumed: file of a choice (`choice_text`) that this job made before a restart. If it exists, its plan is
            followed without trials until drift.
        tell: called on rank 0 with a line that describes each choice.
    Raises:
        ConfigError: another policy; or "flowmoe" without scikit-learn (`fusedmoe[plan]`).
    """
    if policy not in TUNED_POLICIES:
        raise ConfigError(f"tune_step supports {' and '.join(TUNED_POLICIES)}; use plan_step for {policy!r}")
    measure = step.measured_costs if measure is None and step.has_measured else measure
    if policy != AUTO and step.blocks is None:
        raise ConfigError(f"tune_step: {policy!r} plans blocks of fusedmoe.pipeline; use {AUTO!r} for layers")
    source = StepSource(step, policy, tell, measure, resumed)
    return PlanChooser(source, steps=2 if policy == AUTO else _STEPS_PER_SIZE, drift=drift)


def tune_model(
    model: nn.Module, *, limit: int = MAX_DEGREE, drift: float | None = 0.1, tell: Callable[[str], None] = print
) -> PlanChooser:
    """Create a `PlanChooser` for a model; enter it around each training step.

    The first step runs without a plan and measures costs, once per machine: the first forward, training or not, and the
    one after drift are collective over all ranks, replicas included. Plans use collectives, not one-sided kernels, and
    have no gradient buckets, unlike those of `tune_step(PlannedStep(model, topology))`. With layers of other libraries,
    only ranks that share experts choose together. Without ranks that exchange tokens, no plan is chosen.

    Args:
        model: contains `MoELayer`s, or `fusedmoe.hf`, `.titan.routed_experts` or `.megatron` layers; the same on every
            rank, as is the number of steps. Chosen plans override the layers' schedules.
        limit: largest number of chunks.
        drift, tell: as for `tune_step`.
    Raises:
        ConfigError: a model without such layers, or with a `fusedmoe.pipeline`.
        RankError: from a step: ranks derived different plans.
    """
    layers = moe_layers(model) or exchanges_in(model)
    if not layers:
        raise ConfigError(
            "tune_model: the model has no experts that fusedmoe runs: no MoELayer, and no layer of fusedmoe.hf, "
            "fusedmoe.titan.routed_experts or fusedmoe.megatron"
        )
    topologies = (layer.topology for layer in layers)
    topology = next((one for one in topologies if one.ep.size * one.esp.size > 1), None)
    if topology is None:
        return PlanChooser(PlanSource(), steps=None)
    step = PlannedStep(model, topology, limit=limit, dense=[() for _ in layers])
    return tune_step(step, drift=drift, tell=tell)


class StepSource(PlanSource):
    """Plans of a whole training step, which a `PlannedStep` creates and applies. Arguments are those of `tune_step`."""

    def __init__(
        self,
        step: PlannedStep,
        policy: str,
        tell: Callable[[str], None],
        measure: Measure | None,
        resumed: Path | None,
    ) -> None:
        self.step = step
        self._policy, self._show_line, self._measure, self._resumed_path = policy, tell, measure, resumed
        self._path = Path()
        # Consecutive `measure` calls that returned None.
        self._num_deferred = 0
        self._search: BucketSearch | None = None
        if policy != AUTO and step.has_costs and (largest := max(step.costs.gradient_bytes)):
            self._search = BucketSearch(largest)
        self._num_searches, self._searched_plans, self._has_degrees = 0, set[str](), False

    @property
    def has_costs(self) -> bool:
        return self.step.has_costs

    def load_earlier_choice(self) -> tuple[float, Sequence[PlanCandidate]] | None:
        self._path = self.step.choice_path(self._policy)
        resumed = None if self._resumed_path is None else self.step.cached_choice(self._policy, self._resumed_path)
        if resumed is not None:
            return resumed[0], resumed[1][:1]  # without the plans it was compared with
        return self.step.cached_choice(self._policy, self._path)

    def candidates(self) -> list[PlanCandidate]:
        self._num_searches, self._searched_plans, self._has_degrees = 0, set(), False
        return self.step.candidates() if self._policy == AUTO else [self.step.candidate(self._policy)]

    def make_further_candidates(self, chooser: PlanChooser) -> list[PlanCandidate]:
        """Return untried plans near the best one; for "flowmoe", once there are none, the next bucket size."""
        if not self._has_degrees and (untried := self._untried_neighbours(chooser)):
            return untried
        return [] if self._search is None else self._next_size(self._search, chooser)

    def measure(self, chooser: PlanChooser, budget_s: float) -> float | None:
        if self._measure is None or (budget_s < _MIN_MEASUREMENT_S and not self._num_deferred):
            return 0.0
        began_s, had_costs = time.perf_counter(), self.has_costs
        costs = self._measure(min(budget_s, BUDGET_S))
        self._num_deferred = 0 if costs is not None else self._num_deferred + 1
        if costs is None:
            if had_costs and self._num_deferred > _MAX_DEFERRED_STEPS:
                self._num_deferred = 0
                self.step.cancel_measurement()
                return 0.0
            if not had_costs and chooser.trials.num_steps == 1 and self.step.topology.is_first:
                self._show_line(
                    "schedule: a step had nothing to measure: experts on one rank, compiled blocks and selective "
                    "activation checkpoints run without a schedule, so plans have no effect there"
                )
            return None
        self.step.set_costs(costs)
        # Predictions by old costs are not comparable. Plans in new objects are applied again.
        for entry in chooser.trials.entries:
            entry.candidate = self.step.predicted(entry.candidate)
        return self.max_over_ranks([time.perf_counter() - began_s])[0] if had_costs else 0.0

    def follow(self, candidate: PlanCandidate) -> None:
        if self.has_costs:
            self.step.follow(candidate)

    def max_over_ranks(self, seconds: list[float]) -> list[float]:
        if not self.has_costs:
            return seconds
        return max_over_ranks_s(self.step.topology.world, seconds, "maximum of step times")

    def report(self, chooser: PlanChooser) -> None:
        if self.step.topology.is_first:
            if not chooser.trials.is_too_noisy:
                write_or_warn(self._path, choice_text(chooser), "what was measured")
            self._show_line(chooser.describe_choice())

    def guard(self) -> AbstractContextManager[None]:
        return self.step.topology.guard("PlanChooser.note")

    def completion_time_s(self, chooser: PlanChooser) -> float:
        # Once a plan is chosen, the host does not synchronise.
        if torch.cuda.is_initialized() and not chooser.is_settled:
            torch.cuda.synchronize()
        return super().completion_time_s(chooser)

    def _untried_neighbours(self, chooser: PlanChooser) -> list[PlanCandidate]:
        best, step = chooser.best.candidate, self.step
        self._num_searches += 1
        if self._num_searches > _MAX_SEARCHES or best.name in self._searched_plans:
            return []
        self._searched_plans.add(best.name)
        entries = chooser.trials.entries
        tried = {(entry.candidate.plan.fingerprint, entry.candidate.uses_micro_batches) for entry in entries}
        neighbours = neighbour_candidates if self._policy == AUTO else neighbour_degrees
        near = neighbours(best, step.costs_of(best.uses_micro_batches), step.limit, step.samples)
        return [
            new for new in near if (new.plan.fingerprint, new.uses_micro_batches) not in tried and step.is_runnable(new)
        ]

    def _next_size(self, search: BucketSearch, chooser: PlanChooser) -> list[PlanCandidate]:
        best, entries = chooser.best, chooser.trials.entries
        measured = best.median_s / best.candidate.predicted_s  # for candidates predicted too slow to try
        # Data points are steps with the same number of micro-batches.
        alike = [entry for entry in entries if entry.candidate.plan.degrees == best.candidate.plan.degrees]
        search.tried = [
            (largest, entry.median_s if entry.step_times_s else measured * entry.candidate.predicted_s)
            for entry in (alike if self._has_degrees else ())
            if (largest := entry.candidate.plan.largest_bucket)
        ]
        self._has_degrees = True
        size = search.next()
        if size is None:
            return []
        new = replace_bucket_bytes(best.candidate, self.step.costs, size)
        return (
            [new] if self.step.is_runnable(new) and new.plan not in [entry.candidate.plan for entry in entries] else []
        )


@dataclass
class BucketSearch:
    """Bayesian optimisation of the gradient bucket size S_p for step time (FlowMoE §4.3).

    Tries the size with the largest expected improvement under a Gaussian process next.

        while (size := search.next()) is not None:
            search.tried.append((size, seconds(size)))

    Args:
        largest_bytes: bytes of a layer's gradient; sizes are in (0, largest_bytes].
        samples: number of sizes to try, the first at random.
        seed: of the first size. Equal seeds and times on all ranks yield equal sizes.
    Attributes:
        tried: measured (bytes, seconds), in any order.
    Raises:
        ConfigError: arguments below 1, or no scikit-learn (`fusedmoe[plan]`).
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
        if find_spec("sklearn") is None:  # fail now, not at the second size
            raise ConfigError("tuning S_p needs scikit-learn: pip install 'fusedmoe[plan]'")
        self._rng = np.random.default_rng(self.seed)

    def next(self) -> int | None:
        """Return the next size in bytes; None after `samples` sizes."""
        if len(self.tried) >= self.samples:
            return None
        if not self.tried:
            return max(1, round(self.largest_bytes * float(self._rng.uniform())))
        return self._most_promising()

    def _most_promising(self) -> int:
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        bytes_, seconds = (np.array(column, dtype=float) for column in zip(*self.tried, strict=True))
        spread = seconds.std() or 1.0
        values = (seconds - seconds.mean()) / spread
        # Matérn 5/2: step time has a kink where buckets saturate the link, but no jumps. White noise: steps vary.
        kernel = Matern(length_scale=0.3, length_scale_bounds=(0.02, 3.0), nu=2.5) + WhiteKernel(1e-3, (1e-6, 1e-1))
        process = GaussianProcessRegressor(kernel, random_state=self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few points may not determine the length scale
            process.fit(self._log_fraction(bytes_), values)
        min_bytes = max(1.0, self.largest_bytes * _MIN_FRACTION)
        sizes = np.unique(np.ceil(np.geomspace(min_bytes, self.largest_bytes, _NUM_SIZES)).astype(int))
        sizes = sizes[~np.isin(sizes, bytes_)]
        if not len(sizes):
            return int(bytes_[seconds.argmin()])
        mean, std = process.predict(self._log_fraction(sizes.astype(float)), return_std=True)
        # Expected improvement, E[max(0, best - f - exploration)] of a normal f.
        gain = values.min() - mean - _EXPLORATION
        z = gain / np.maximum(std, 1e-12)
        return int(sizes[(gain * norm.cdf(z) + std * norm.pdf(z)).argmax()])

    def _log_fraction(self, bytes_: np.ndarray) -> np.ndarray:
        return np.log(bytes_ / self.largest_bytes)[:, None]
