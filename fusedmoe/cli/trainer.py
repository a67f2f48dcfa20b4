"""The training loop: reproducible steps, plan selection, and the held-out loss."""

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
from fusedmoe.cli.data import Batches, ByteBatch, Corpus, hash_seed
from fusedmoe.cli.job import StopRequest, make_model, make_optimizer, shard_experts
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import (
    measurement_plans,
    micro_batch_axis_size,
    selected_policy,
    split_axis,
    step_workload,
    uses_micro_batches,
    with_measured_tasks,
)
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.errors import RankError
from fusedmoe.models.config import BYTES
from fusedmoe.models.transformer import Loss
from fusedmoe.runtime.cache import cached_task_times
from fusedmoe.runtime.profiler import STEPS_BUDGET_S, observe_steps
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule import POLICIES, CostModel, Plan, StepCosts, simulate
from fusedmoe.schedule.candidates import PlanCandidate
from fusedmoe.schedule.cost import Observed
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies.sparse_collectives import hidden_s
from fusedmoe.schedule.task import TaskKind
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.training import PlannedStep, clip_grad_norm, sync_gradients, tune_step
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.plan_tuning import TUNED_POLICIES


@dataclass(frozen=True)
class StepReport:
    """Results of one step, equal on all ranks except `seconds`."""

    # Means over data-parallel ranks: nats per target, and the unweighted sum of the gates' losses over layers.
    loss: float
    aux_loss: float
    # Norm of the whole gradient before clipping.
    grad_norm: float
    # Fraction of routed rows dropped by the capacity.
    dropped: float
    # Summed over data-parallel ranks.
    tokens: int
    seconds: float
    # A rank received a stop request.
    is_stopping: bool


class Trainer:
    """Model, optimizer and data of one rank, and the steps that train it.

    A step depends only on parameters, optimizer state, settings and step number, which seeds batches and gate noise: a
    resumed job continues as if it had not been stopped.

    `batches_per_step`: over all ranks, by default one per data-parallel rank. With fewer ranks, each rank accumulates
    gradients over several batches, so that the step trains on the same text.
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        device: torch.device,
        corpus: Corpus,
        stop_request: StopRequest,
        batches_per_step: int | None = None,
    ) -> None:
        model = settings.model
        self.batches_per_step = batches_per_step or topology.dp.size
        mask = BYTES if model.objective == "masked" else None
        self._settings, self._topology, self._device, self._stop_request = settings, topology, device, stop_request
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
        """Let steps follow the plan that the policy makes from these costs. Return the plan and its costs. Collective.

        With "auto" and "flowmoe", plans are tried in the first steps until the fastest is found. See `tune_step` for
        `resumed`, `tell` and `measure`.
        """
        settings, step = self._settings, self._planned_step(costs, self._blocks)
        if settings.schedule in TUNED_POLICIES:
            self.tuning = tune_step(step, settings.schedule, measure=measure, resumed=resumed, tell=tell)
            candidate = self.tuning.current_candidate
        else:
            candidate = step.candidate(selected_policy(settings))
            step.follow(candidate)
        self._buckets, self._followed = step.buckets, (step, candidate)
        planned = self.planned
        assert planned is not None
        if self.sharded_experts is not None:
            # The hidden time limits the number of experts sent per layer.
            hidden_L = hidden_s(simulate(*planned), len(planned[1].layers), again=settings.rematerialise)
            self.sharded_experts.hide_in(statistics.mean(hidden_L))
        return planned

    @property
    def planned(self) -> tuple[Plan, StepCosts] | None:
        """Plan that steps now follow, and its costs; None without one. An empty plan becomes the sequential plan."""
        if self._followed is None:
            return None
        step, candidate = self._followed
        if self.tuning is not None:
            candidate = self.tuning.current_candidate
        plan, costs = candidate.plan, step.costs_of(candidate.uses_micro_batches)
        return plan if len(plan) else POLICIES["sequential"].plan(costs), costs

    @property
    def is_settled(self) -> bool:
        """True once the plan is final rather than on trial."""
        return self.tuning is None or self.tuning.is_settled

    @property
    def plan_name(self) -> str:
        """Name of the plan that steps currently follow; "off" without one."""
        if self._followed is None:
            return "off"
        return self._settings.schedule if self.tuning is None else self.tuning.current_candidate.name

    def with_measured_times(self, costs: CostModel, budget_s: float = STEPS_BUDGET_S, again: bool = False) -> CostModel:
        """Add cached or newly measured task times of this model's own steps to the costs. Collective.

        Measuring runs a few steps, for about `budget_s`, and then restores model and optimizer. With a dynamic
        placement, whose task times vary, the costs are unchanged. `again`: measure even if cached.
        """
        if self.sharded_experts is not None:
            return costs

        def measure(facts: dict[str, Any], whole: bool) -> Observed:
            blocks = self._blocks if whole else None
            return cached_task_times(self._topology, facts, lambda: self._measure_tasks(costs, budget_s, blocks), again)

        found = with_measured_tasks(costs, self._settings, self._topology, self._device, measure)
        if self._followed is not None:
            self._buckets = self._followed[0].buckets  # measuring steps used other buckets
        return found

    def _measure_tasks(self, costs: CostModel, budget_s: float, blocks: PipelinedBlocks | None) -> Observed:
        topology, step = self._topology, self._planned_step(costs, blocks)
        self._buckets = step.buckets
        plans = measurement_plans(step.costs, micro_batch_axis_size(self._settings, topology.mp.size))

        def run(plan: Plan, number: int) -> Timeline:
            step.follow(PlanCandidate("a probe", plan, blocks is not None, 0.0))
            return self.recorded_step(number)[1]

        with self._preserve_state():
            observed = observe_steps(topology, plans, step.costs, run, budget_s)
        return replace(observed, rows=step.workload.rows)

    @contextmanager
    def _preserve_state(self) -> Iterator[None]:
        # On the host to spare GPU memory.
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
        axis = split_axis(self._settings, self._topology.mp.size)
        return self.model.pipeline_blocks(axis) if uses_micro_batches(self._settings) else None

    def _planned_step(self, costs: CostModel, blocks: PipelinedBlocks | None) -> PlannedStep:
        settings, topology, dense = self._settings, self._topology, self.model.dense_parameters()
        workload = step_workload(settings, topology.ep.size, topology.esp.size, topology.mp.size)
        samples = None if blocks is None else micro_batch_axis_size(settings, topology.mp.size)
        return PlannedStep(self.model, topology, costs, workload, blocks=blocks, samples=samples, dense=dense)

    def close(self) -> None:
        if self.sharded_experts is not None:
            self.sharded_experts.close()

    def step(self, step: int, recorder: Recorder | None = None) -> StepReport:
        """Run one training step, counted from 0. Collective over all ranks."""
        settings, topology = self._settings, self._topology
        began = time.perf_counter()
        self._seed("step", step)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        loss_sum: Tensor | float = 0.0
        aux_sum: Tensor | float = 0.0
        for share, weight, last in self._own_batches():
            # A batch of weight 0 runs because other ranks wait for its rows.
            if not weight:
                self.model.eval()  # gates must not update their state
            loss = self._loss(self._training.training_batch(settings.seed, step, share))
            if self._buckets is not None and last:
                # Earlier gradients are incomplete.
                self._buckets.open(recorder)
            # Omitting a factor of 1 keeps results bitwise equal.
            whole = loss.nats + settings.aux_weight * loss.aux
            (whole if weight == 1 else weight * whole).backward()
            loss_sum, aux_sum = loss_sum + weight * loss.nats.detach(), aux_sum + weight * loss.aux.detach()
        self.model.train()
        with span(recorder, "gradient sync", kind=TaskKind.GRADIENT_ALL_REDUCE, resource="inter"):
            sync_gradients(self.model, topology, buckets=self._buckets)
        with span(recorder, "optimizer", kind=TaskKind.OPTIMIZER):
            norm = float(clip_grad_norm(self.model, topology, settings.clip or math.inf))
            # The norm is a sum over all ranks: all ranks raise together.
            if not math.isfinite(norm):
                raise RankError(
                    f"rank {topology.rank}: gradient norm of step {step + 1} is not finite ({norm});  "
                    "lower --lr, or resume from the last checkpoint with another --seed"
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            # Loss-free balancing updates gate biases by the loads of this step. Collective.
            self.model.update_gates()
            layers = list(self.model.moe_layers())
            dropped, slots = sum(layer.dropped for layer in layers), sum(int(layer.load_E.sum()) for layer in layers)
            # One all-reduce, also of the stop request: all ranks agree on it.
            nats, aux, lost, routed, stop = self._sum(
                loss_sum, aux_sum, float(dropped), float(slots), float(self._stop_request.is_requested)
            )
        seconds = time.perf_counter() - began
        if self.tuning is not None and recorder is None:
            self.tuning.note(seconds)
        return StepReport(
            loss=nats / topology.dp.size,
            aux_loss=aux / topology.dp.size,
            grad_norm=norm,
            dropped=lost / max(1.0, routed),
            tokens=settings.model.batch * settings.model.seq_len * self.batches_per_step,
            seconds=seconds,
            is_stopping=stop > 0,
        )

    def exclude_next_step(self) -> None:
        """Exclude the next step from plan tuning: other work may have slowed it."""
        if self.tuning is not None:
            self.tuning.skip()

    def recorded_step(self, step: int) -> tuple[StepReport, Timeline]:
        """Run one step like `step` and also return this rank's timeline. Excludes the next step from plan tuning."""
        recorder = Recorder(self._topology.rank, device=self._device)
        self.model.record(recorder)
        try:
            return self.step(step, recorder), recorder.timeline()
        finally:
            self.model.record(None)
            self.exclude_next_step()

    def load_LE(self) -> Tensor | None:
        """Return [L, E]: this rank's choices by layer and expert in the last step; None without MoE layers."""
        loads = [layer.load_E for layer in self.model.moe_layers()]
        return torch.stack(loads) if loads else None

    def held_out_loss(self) -> float | None:
        """Return the loss in nats per (masked) byte of fixed windows; None after a stop request. Collective."""
        settings, topology = self._settings, self._topology
        # Some gates (for example random) draw numbers in evaluation too.
        self._seed("held out", 0)
        self.model.eval()
        nats = targets = 0.0
        batches = settings.eval_batches * self.batches_per_step
        for index in range(-(-batches // topology.dp.size)):
            # All ranks must run the same number of forward passes.
            place = index * topology.dp.size + topology.dp.index
            batch = self._held_out.held_out_batch(place % batches, batches)
            with torch.no_grad():
                loss = self._loss(batch)
            # All ranks of an MP group count the same targets.
            count = loss.targets / topology.mp.size * (place < batches)
            total = loss.nats * loss.targets * (place < batches)
            part, number, stop = self._sum(total, count, float(self._stop_request.is_requested))
            if stop:
                return None
            nats, targets = nats + part, targets + number
        self.model.train()
        return nats / targets

    def _own_batches(self) -> Iterator[tuple[int, float, bool]]:
        """Yield this rank's batches of a step: number, weight in the gradient, and whether it is the last.

        All ranks run the same number of batches, because they exchange rows. Surplus batches have weight 0.
        """
        replicas, own = self._topology.dp.size, self._topology.dp.index
        each = -(-self.batches_per_step // replicas)
        for share in range(own * each, (own + 1) * each):
            # The weight turns the mean over replicas into the mean over all batches.
            weight = replicas / self.batches_per_step if share < self.batches_per_step else 0.0
            yield share % self.batches_per_step, weight, share == (own + 1) * each - 1

    def _loss(self, batch: ByteBatch) -> Loss:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.dtype == "bf16"):
            return self.model(batch.tokens_BL.to(self._device), batch.targets_BL.to(self._device))

    def _seed(self, *what: str | int) -> None:
        torch.manual_seed(hash_seed(self._settings.seed, *what, self._topology.rank))

    def _sum(self, *values: Tensor | float) -> list[float]:
        # float64 keeps the sum over many ranks exact enough for comparing jobs.
        row = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device).detach() for v in values])
        return all_reduce(self._topology.world, row, operation="sum of losses").tolist()
