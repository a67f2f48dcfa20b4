"""The training loop: steps that can be stopped and repeated, and the held-out loss at their end."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedmoe import PipelinedBlocks, Topology
from fusedmoe.cli.data import Batches, ByteBatch, Corpus, mix
from fusedmoe.cli.job import StopRequest, make_model, make_optimizer, shard_experts
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import (
    micro_batch_limit,
    policy_of,
    probes,
    split_axis,
    splits_layers,
    step_workload,
    with_observed,
)
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.errors import RankError
from fusedmoe.models.transformer import Loss
from fusedmoe.runtime.cache import cached_observed
from fusedmoe.runtime.profiler import STEPS_BUDGET_S, observe_steps
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule import POLICIES, CostModel, Plan, PlanChooser, StepCosts, Timeline, Workload, simulate
from fusedmoe.schedule.candidates import PlanCandidate
from fusedmoe.schedule.cost import Observed
from fusedmoe.schedule.policies.sparse_collectives import hidden_s
from fusedmoe.schedule.task import TaskKind
from fusedmoe.training import PlannedStep, clip_grad_norm, sync_gradients, tune_step
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.plan_tuning import TUNED


@dataclass(frozen=True)
class StepReport:
    """Facts about a step that all ranks know after it; `seconds` alone are this rank's."""

    # Means over the replicas: nats per target, and the gates' losses summed over layers, unweighted.
    loss: float
    aux_loss: float
    # Of the whole gradient, before clipping.
    grad_norm: float
    # Share of routed rows that the capacity dropped.
    dropped: float
    # Of all replicas.
    tokens: int
    seconds: float
    # Some rank was asked to stop.
    stop: bool


class Trainer:
    """A model, its optimizer and its data on one rank, and the steps that train it.

    A step is a function of the parameters, the optimizer's state, the settings and the step's number: batches and the
    gates' noise are drawn from generators seeded by them. So a resumed job goes on as if it had not been stopped.

    Args:
        shares: batches of a step, over all ranks; by default one for each data-parallel rank. Ranks that are fewer take
            several, one after another, whose gradients add up: the step is of the same text.
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        device: torch.device,
        corpus: Corpus,
        stop: StopRequest,
        shares: int | None = None,
    ) -> None:
        model = settings.model
        self.shares = shares or topology.dp.size
        # A masked model is asked for hidden bytes, a causal one for the next byte.
        mask = model.mask if model.objective == "masked" else None
        self._settings, self._topology, self._device, self._stop = settings, topology, device, stop
        self._training = Batches(corpus.train, model.batch, model.seq_len, mask=mask)
        self._held_out = Batches(corpus.held_out, model.batch, model.seq_len, mask=mask)
        self.model = make_model(settings, model, topology, device)
        self.optimizer = make_optimizer(self.model, settings)
        self.sharded_experts = shard_experts(self.model, self.optimizer, topology, settings)
        self._buckets: GradientBuckets | None = None
        self._followed: tuple[PlannedStep, PlanCandidate] | None = None
        self.tuning: PlanChooser | None = None

    def set_plan(
        self,
        costs: CostModel,
        resumed: Path | None = None,
        tell: Callable[[str], None] = print,
        measure: Callable[[float], CostModel] | None = None,
    ) -> tuple[Plan, StepCosts]:
        """Has steps follow the plan that the settings' policy makes of these costs; collective.

        Under "auto" and "flowmoe" the plan changes from step to step until the fastest is found, and `resumed`, `tell`
        and `measure` are as for `tune_step`. Returns the plan, and the costs by which it was made.
        """
        settings, blocks = self._settings, self._blocks
        more: dict[str, Any] = {}
        if blocks is not None:
            # Micro-batches are cut evenly, so the planner needs the number of samples that it may divide.
            more = {"blocks": blocks, "samples": micro_batch_limit(settings, self._topology.mp.size)}
        step = PlannedStep(self.model, self._topology, costs, self._workload, **more)
        if settings.schedule in TUNED:
            self.tuning = tune_step(step, settings.schedule, measure=measure, resumed=resumed, tell=tell)
            candidate = self.tuning.now
        else:
            candidate = step.candidate(policy_of(settings))
            step.follow(candidate)
        self._buckets, self._followed = step.buckets, (step, candidate)
        planned = self.planned
        assert planned is not None
        if self.sharded_experts is not None:
            # What the plan hides of a sparse collective bounds how many experts may travel for a layer.
            hidden_L = hidden_s(simulate(*planned), len(planned[1].layers), again=settings.rematerialise)
            self.sharded_experts.hide_in(statistics.mean(hidden_L))
        return planned

    @property
    def planned(self) -> tuple[Plan, StepCosts] | None:
        """Returns the plan that steps follow now, and the costs by which it was made; None without."""
        if self._followed is None:
            return None
        step, candidate = self._followed
        if self.tuning is not None:
            candidate = self.tuning.now
        plan, costs = candidate.plan, step.costs_of(candidate.whole)
        # A plan without tasks is what nothing in chunks amounts to: the sequential one, for pictures and tables.
        return plan if len(plan) else POLICIES["sequential"].plan(costs), costs

    @property
    def settled(self) -> bool:
        """Returns whether steps follow the plan that is kept, and not one that is only tried."""
        return self.tuning is None or self.tuning.settled

    @property
    def followed(self) -> str:
        """Returns the name of the plan that steps follow now; "off" without."""
        if self._followed is None:
            return "off"
        return self._settings.schedule if self.tuning is None else self.tuning.now.name

    def measured(self, costs: CostModel, budget_s: float = STEPS_BUDGET_S, again: bool = False) -> CostModel:
        """Adds to costs what the tasks of this model's own steps take, all ranks at once, from disk or measured now;
        collective.

        A few steps run in one chunk and in several, of blocks also with W tasks, and are undone: model and optimizer
        are afterwards as before. After the first step that counts, none begins that would not end in `budget_s`.
        `again`: measure in any case.
        """
        # Where experts move from step to step, no two steps take the same.
        if self.sharded_experts is not None:
            return costs

        def measure(facts: dict[str, Any], whole: bool) -> Observed:
            blocks = self._blocks if whole else None
            return cached_observed(self._topology, facts, lambda: self._observed(costs, budget_s, blocks), again)

        found = with_observed(costs, self._settings, self._topology, self._device, measure)
        if self._followed is not None:
            self._buckets = self._followed[0].buckets  # the probes had their own
        return found

    def _observed(self, costs: CostModel, budget_s: float, blocks: PipelinedBlocks | None) -> Observed:
        topology, workload = self._topology, self._workload
        step = PlannedStep(self.model, topology, costs, workload, blocks=blocks)
        self._buckets = step.buckets
        plans = probes(step.costs, micro_batch_limit(self._settings, topology.mp.size))

        def run(plan: Plan, number: int) -> Timeline:
            # Probes are followed like any plan, so that what is measured is what will run.
            step.follow(PlanCandidate("a probe", plan, blocks is not None, 0.0))
            return self.recorded_step(number)[1]

        with self._undone():
            observed = observe_steps(topology, plans, step.costs, run, budget_s)
        return replace(observed, rows=workload.rows)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """A context whose steps leave nothing behind."""
        # Steps change parameters, buffers and the optimizer's state; copies on the host spare the GPU's memory.
        tensors = [*self.model.parameters(), *self.model.buffers()]
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        state = copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, kept, strict=True):
                    tensor.copy_(before)
            self.optimizer.load_state_dict(state)

    @cached_property
    def _blocks(self) -> PipelinedBlocks | None:
        """The model's blocks, where the settings' policy takes them in micro-batches."""
        along = split_axis(self._settings, self._topology.mp.size)
        return self.model.in_micro_batches(along) if splits_layers(self._settings) else None

    @property
    def _workload(self) -> Workload:
        topology = self._topology
        return step_workload(self._settings, topology.ep.size, topology.esp.size, topology.mp.size)

    def close(self) -> None:
        """Ends what moves experts."""
        if self.sharded_experts is not None:
            self.sharded_experts.close()

    def step(self, step: int) -> StepReport:
        """Does one step (from 0); collective over all ranks."""
        return self._step(step, None)

    def interrupted(self) -> None:
        """Notes that something else than a step ran, after which the next step may take longer on some ranks."""
        if self.tuning is not None:
            self.tuning.skip()

    def recorded_step(self, step: int) -> tuple[StepReport, Timeline]:
        """Does one step, as `step` does, and returns this rank's timeline of it as well."""
        recorder = Recorder(self._topology.rank, device=self._device)
        self.model.record(recorder)
        try:
            return self._step(step, recorder), recorder.timeline()
        finally:
            self.model.record(None)
            self.interrupted()

    def load_LE(self) -> Tensor | None:
        """Returns [L, E]: how many of this rank's choices in the last step went to each expert; None without any."""
        loads = [layer.load_E for layer in self.model.moe_layers()]
        return torch.stack(loads) if loads else None

    def held_out_loss(self) -> float | None:
        """Returns nats per byte (of a masked model per hidden byte) over the held-out windows; None: asked to stop.

        The model is evaluated without noise; the windows are the same every time.
        """
        settings, topology = self._settings, self._topology
        # A gate may draw in evaluation, too: a random one, say.
        self._seed("held out", 0)
        self.model.eval()
        nats = targets = 0.0
        batches = settings.eval_batches * self.shares
        for index in range(-(-batches // topology.dp.size)):
            # Replicas take windows in turn. All must call the model equally often, so the last round may repeat
            # windows.
            place = index * topology.dp.size + topology.dp.index
            batch = self._held_out.held_out(place % batches, batches)
            with torch.no_grad():
                loss = self._loss(batch)
            # Each rank of an mp group counts the same targets.
            count = loss.targets / topology.mp.size * (place < batches)
            total = loss.nats * loss.targets * (place < batches)
            part, number, stop = self._sum(total, count, float(self._stop.wanted))
            if stop:
                return None
            nats, targets = nats + part, targets + number
        self.model.train()
        return nats / targets

    def _step(self, step: int, recorder: Recorder | None) -> StepReport:
        settings, topology = self._settings, self._topology
        began = time.perf_counter()
        # A step depends on its number alone, so that a resumed job repeats none and skips none.
        self._seed("step", step)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        loss_sum: Tensor | float = 0.0
        aux_sum: Tensor | float = 0.0
        for share, weight, last in self._own_shares():
            # A batch beyond the step's share runs for the sake of the other ranks, which wait for its rows.
            if not weight:
                self.model.eval()  # gates must not learn from a batch of weight 0
            loss = self._loss(self._training.training(settings.seed, step, share))
            if self._buckets is not None and last:
                # Buckets travel during the last backward pass only: before it gradients are not complete.
                self._buckets.open(recorder)
            # `1 * loss` would be another operation in the graph: losses of jobs without shares keep their bits.
            whole = loss.nats + settings.aux_weight * loss.aux
            (whole if weight == 1 else weight * whole).backward()
            loss_sum, aux_sum = loss_sum + weight * loss.nats.detach(), aux_sum + weight * loss.aux.detach()
        self.model.train()
        with span(recorder, "gradient sync", kind=TaskKind.GRADIENT_ALL_REDUCE, resource="inter"):
            sync_gradients(self.model, topology, buckets=self._buckets)
        with span(recorder, "optimizer", kind=TaskKind.OPTIMIZER):
            norm = float(clip_grad_norm(self.model, topology, settings.clip or math.inf))
            # The norm is a sum over all ranks, so all refuse together, and nobody waits for a rank that ended.
            if not math.isfinite(norm):
                raise RankError(
                    f"rank {topology.rank}: the gradient of step {step + 1} is not finite (norm {norm}); "
                    "lower --lr, or go on from the last checkpoint with another --seed"
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            # Gates that balance without a loss move their biases by the loads of this step; collective.
            self.model.update_gates()
            layers = list(self.model.moe_layers())
            dropped, slots = sum(layer.dropped for layer in layers), sum(int(layer.load_E.sum()) for layer in layers)
            # One all-reduce for everything that is reported, the wish to stop among it: ranks then agree on it.
            nats, aux, lost, routed, stop = self._sum(
                loss_sum, aux_sum, float(dropped), float(slots), float(self._stop.wanted)
            )
        seconds = time.perf_counter() - began
        # A recorded step is slower, and must not count against the plan that it follows.
        if self.tuning is not None and recorder is None:
            self.tuning.note(seconds)
        return StepReport(
            loss=nats / topology.dp.size,
            aux_loss=aux / topology.dp.size,
            grad_norm=norm,
            dropped=lost / max(1.0, routed),
            tokens=settings.model.batch * settings.model.seq_len * self.shares,
            seconds=seconds,
            stop=stop > 0,
        )

    def _own_shares(self) -> Iterator[tuple[int, float, bool]]:
        """Yields this replica's batches in a step: the number, its weight in the gradient, and whether it is the last.

        Ranks exchange rows, so all take equally many; a batch too many has weight 0.
        """
        replicas, own = self._topology.dp.size, self._topology.dp.index
        # Rounded up: ranks that are fewer than shares take several, the last ones perhaps one too many.
        each = -(-self.shares // replicas)
        for share in range(own * each, (own + 1) * each):
            # Gradients are averaged over replicas: a share weighs as if there were as many replicas as shares.
            weight = replicas / self.shares if share < self.shares else 0.0
            yield share % self.shares, weight, share == (own + 1) * each - 1

    def _loss(self, batch: ByteBatch) -> Loss:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.dtype == "bf16"):
            return self.model(batch.tokens_BL.to(self._device), batch.targets_BL.to(self._device))

    def _seed(self, *what: str | int) -> None:
        torch.manual_seed(mix(self._settings.seed, *what, self._topology.rank))

    def _sum(self, *values: Tensor | float) -> list[float]:
        """Sums values over all ranks."""
        # float64 keeps sums of many ranks' losses exact enough to compare jobs by them.
        row = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device).detach() for v in values])
        return all_reduce(self._topology.world, row, operation="sum of losses").tolist()
