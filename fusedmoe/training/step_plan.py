"""A whole training step by one plan: every layer's chunks, and gradient all-reduces beside them in buckets.

The size of buckets can be tuned while a model trains (FlowMoE §4.3): Bayesian optimisation of S_p by step time. A few
steps are done with each size that is tried. What they took is a point of a Gaussian process over sizes, and the size
with the largest expected improvement is tried next. Afterwards the best of those tried is kept, until steps take longer
or shorter by more than `drift`: then all begins anew.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.pipeline import PipelinedBlocks
from fusedmoe.layers.schedule import measured_costs
from fusedmoe.runtime.cache import cached_plans
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import LAYER_POLICIES, POLICIES, WHOLE_POLICIES
from fusedmoe.schedule.step import StepSplit, buckets_after, micro_schedule, one_pass, pass_of
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.workload import Workload
from fusedmoe.training.copies import MpLoss
from fusedmoe.training.gradient_buckets import GradientBuckets, moe_layers

# Sizes that may be tried, evenly in their logarithm, and the least of them as a share of the largest.
_GRID, _LEAST = 256, 2**-6
# In units of the spread of what was measured; as in the paper.
_EXPLORATION = 0.1


def plan_step(
    model: nn.Module,
    topology: Topology,
    policy: str,
    costs: CostModel | None,
    workload: Workload,
    *,
    limit: int = MAX_DEGREE,
    mp_loss: MpLoss = "summands",
    blocks: PipelinedBlocks | None = None,
    samples: int | None = None,
) -> tuple[Plan, GradientBuckets]:
    """Plans a training step of a model and has its MoE layers follow the plan; collective over all ranks.

    Layers that are blocks in micro-batches (`fusedmoe.pipeline`) follow plans of whole models, with their dense parts
    and weight gradients (FlowMoE, Lancet); others only have the plan's chunks and gradient buckets.

        plan, buckets = plan_step(model, topology, "fsmoe", costs, workload)
        plan, buckets = plan_step(model, topology, "joint", None, blocks.workload(x))  # of fusedmoe.pipeline
        …
        buckets.open()
        loss.backward()
        sync_gradients(model, topology, buckets=buckets)

    Args:
        policy: a name of `fusedmoe.schedule.policies.LAYER_POLICIES`, for blocks any of `POLICIES` there.
        costs: of this machine, the same on every rank; None: measured now, or before (`fusedmoe profile`).
        workload: of one of the model's layers, which are taken to be alike.
        limit: the largest degree.
        blocks: where they are no module of the model.
        samples: of a batch of theirs: micro-batches then have equally many.
    Returns:
        The plan of the step, whose tasks that are not of the layers' pipelines follow autograd's order, and the
        gradients that it reduces on the way.
    Raises:
        ConfigError: an unknown policy, or a model without MoE layers.
        RankError: ranks that come to different plans.
    """
    found = [module for module in model.modules() if isinstance(module, PipelinedBlocks)]
    if blocks is None and found:
        blocks = found[0]
    known = LAYER_POLICIES if blocks is None else POLICIES
    if policy not in known:
        raise ConfigError(f"unknown schedule {policy!r}; choose {', '.join(known)}")
    if costs is None:
        first = next(model.parameters())
        costs = measured_costs(topology, first.device, first.dtype)
    if blocks is not None:
        if len(found) > 1:
            raise ConfigError("plan_step: the model has several pipelines; make one of all its blocks")
        return _plan_blocks(model, blocks, policy, costs, workload, limit, samples, mp_loss)
    layers = moe_layers(model)
    if not layers:
        raise ConfigError("plan_step: the model has no MoELayer, so there is nothing to plan")
    buckets = GradientBuckets(model, topology, mp_loss=mp_loss)
    kinds = runnable_kinds(Capabilities(layers[0].topology.ep.size, layers[0].topology.esp.size), "step")
    plan = POLICIES[policy].plan(workload.step_costs(costs, buckets.layer_bytes, kinds), limit)
    require_runnable(plan, kinds, f"plan_step: the plan by {policy}")
    topology.agree({"plan": plan.fingerprint}, "plan of the training step")
    for number, layer in enumerate(layers):
        plans = Plans(pass_of(plan, number, "forward"), pass_of(plan, number, "backward"))
        layer.set_plan(plans, buckets, buckets_after(plan, number))
    return plan, buckets


def _plan_blocks(
    model: nn.Module,
    blocks: PipelinedBlocks,
    policy: str,
    costs: CostModel,
    workload: Workload,
    limit: int,
    samples: int | None,
    mp_loss: MpLoss,
) -> tuple[Plan, GradientBuckets]:
    buckets = GradientBuckets(model, blocks.topology, mp_loss=mp_loss, dense=blocks.dense_parameters)
    step_costs = blocks_costs(blocks, costs, workload, buckets)
    if policy in WHOLE_POLICIES:
        plan = cached_plans([policy], blocks.topology, step_costs, limit=limit, samples=samples)[policy]
    else:
        plan = POLICIES[policy].plan(step_costs, limit)
    blocks.set_plan(Plans(one_pass(plan, "forward"), one_pass(plan, "backward")), buckets)
    return plan, buckets


def blocks_costs(blocks: PipelinedBlocks, costs: CostModel, workload: Workload, buckets: GradientBuckets) -> StepCosts:
    """What a step of these blocks costs, by the costs of a machine."""
    layer = blocks.experts[0]
    assert isinstance(layer, MoELayer)
    kinds = runnable_kinds(Capabilities(layer.topology.ep.size, layer.topology.esp.size), "blocks")
    return workload.step_costs(costs, buckets.layer_bytes, kinds, whole=True, waits=any(blocks.waits))


class BucketTuning:
    """Has blocks follow a plan with one S_p after the other, and keeps to the best (FlowMoE §4.3).

        tuning = BucketTuning(blocks, buckets, costs, plan)
        for batch in batches:
            seconds = step(batch)
            tuning.note(seconds)

    Args:
        blocks, buckets: of the model.
        costs, plan: of its steps, the same on every rank; a plan of `micro_schedule`, such as FlowMoE's.
        samples: sizes that are tried.   steps: with each.
        drift: by which share steps must change for it to begin anew; None: never.
    Attributes:
        plan: that is followed now.   tuner: what was tried.
    Raises:
        ConfigError: without scikit-learn (`fusedmoe[plan]`), or numbers that are not positive.
    """

    def __init__(
        self,
        blocks: PipelinedBlocks,
        buckets: GradientBuckets,
        costs: StepCosts,
        plan: Plan,
        *,
        samples: int = 8,
        steps: int = 10,
        drift: float | None = 0.1,
    ) -> None:
        self._blocks, self._buckets, self._costs, self._split = blocks, buckets, costs, StepSplit.from_plan(plan)
        self.tuner = BucketTuner(max(costs.gradient_bytes), samples, steps, drift)
        self.plan: Plan
        self._follow()

    def note(self, seconds: float) -> None:
        """What a step took on this rank; the slowest rank's counts. Collective over all ranks."""
        took = torch.tensor([seconds], dtype=torch.float64)
        all_reduce(self._blocks.topology.world, took, "max", "the longest step of all ranks")
        before = self.tuner.bucket_bytes
        self.tuner.note(float(took))
        if self.tuner.bucket_bytes != before:
            self._follow()

    def _follow(self) -> None:
        split = self._split._replace(bucket_bytes=self.tuner.bucket_bytes)
        self.plan = micro_schedule(self._costs, split).plan()
        self._blocks.set_plan(Plans(one_pass(self.plan, "forward"), one_pass(self.plan, "backward")), self._buckets)


@dataclass
class BucketTuner:
    """Finds S_p, the bytes of a gradient bucket.

    Args:
        largest_bytes: of a layer's gradient, in bytes: the range is (0, largest_bytes].
        samples: sizes that are tried, the first at random.
        steps: with each of them; their median counts, which one slow step does not move (the paper takes the mean).
        drift: by which share steps must change for all to begin anew; None: never.
        seed: of the first size. The same on every rank, as must be the seconds that are noted: then all ranks always
            have the same size.
    Attributes:
        bucket_bytes: to use in the next step.
        tried: (bytes, seconds) so far.
    Raises:
        ConfigError: numbers that are not positive, or no scikit-learn (`fusedmoe[plan]`).
    """

    largest_bytes: int
    samples: int = 8
    steps: int = 10
    drift: float | None = 0.1
    seed: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list, init=False)
    bucket_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if min(self.largest_bytes, self.samples, self.steps) < 1 or (self.drift is not None and self.drift <= 0):
            raise ConfigError(
                f"tuning S_p needs largest_bytes = {self.largest_bytes}, samples = {self.samples} and steps = "
                f"{self.steps} of at least 1, and drift = {self.drift} above 0 or None"
            )
        if find_spec("sklearn") is None:  # told now, and not when the second size is to be chosen
            raise ConfigError("tuning S_p needs scikit-learn: pip install 'fusedmoe[plan]'")
        self._chance = np.random.default_rng(self.seed)
        self._seconds: list[float] = []
        self._settled_s: float | None = None
        self.bucket_bytes = self._random()

    @property
    def settled(self) -> bool:
        """Whether the size is the best of all samples, and no longer one of them."""
        return self._settled_s is not None

    def note(self, seconds: float) -> None:
        """What a step with `bucket_bytes` took."""
        self._seconds.append(seconds)
        if len(self._seconds) < self.steps:
            return
        median_s, self._seconds = statistics.median(self._seconds), []
        if self._settled_s is not None:
            if self.drift is not None and abs(median_s - self._settled_s) > self.drift * self._settled_s:
                self._settled_s, self.tried = None, []
                self.bucket_bytes = self._random()
            return
        self.tried.append((self.bucket_bytes, median_s))
        if len(self.tried) < self.samples:
            self.bucket_bytes = self._next()
        else:
            self.bucket_bytes, self._settled_s = min(self.tried, key=lambda one: one[1])

    def _random(self) -> int:
        return max(1, round(self.largest_bytes * float(self._chance.uniform())))

    def _next(self) -> int:
        """The size with the largest expected improvement, of those that were not tried."""
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        bytes_, seconds = (np.array(column, dtype=float) for column in zip(*self.tried, strict=True))
        spread = seconds.std() or 1.0
        values = (seconds - seconds.mean()) / spread
        kernel = Matern(length_scale=0.3, length_scale_bounds=(0.02, 3.0), nu=2.5) + WhiteKernel(1e-3, (1e-6, 1e-1))
        process = GaussianProcessRegressor(kernel, random_state=self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few points do not always say how smooth they are
            process.fit(self._place(bytes_), values)
        sizes = np.unique(np.ceil(self._candidates()).astype(int))
        sizes = sizes[~np.isin(sizes, bytes_)]
        if not len(sizes):
            return int(bytes_[seconds.argmin()])
        mean, std = process.predict(self._place(sizes.astype(float)), return_std=True)
        gain = values.min() - mean - _EXPLORATION
        z = gain / np.maximum(std, 1e-12)
        return int(sizes[(gain * norm.cdf(z) + std * norm.pdf(z)).argmax()])

    def _candidates(self) -> np.ndarray:
        return np.geomspace(max(1.0, self.largest_bytes * _LEAST), self.largest_bytes, _GRID)

    def _place(self, bytes_: np.ndarray) -> np.ndarray:
        """Where a size is between nothing and the largest, by the number of buckets that it makes."""
        return np.log(bytes_ / self.largest_bytes)[:, None]
