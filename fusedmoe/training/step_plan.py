"""Plan of a whole training step: chunks of every layer, and gradient all-reduces in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedmoe.blocks.cuts import split_by_phase
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.measure import CostMeasurement, MeasurementState
from fusedmoe.layers.moe import MoELayer, number_layers
from fusedmoe.layers.scheduled_exchange import ScheduledExchange, exchanges_in
from fusedmoe.placement.replicas import ReplicaTiming
from fusedmoe.runtime.cache import cached_plans, choice_path, read_choice
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.schedule.candidates import PlanCandidate, family_candidates, predicted_s, sort_distinct
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies, user_plan_fingerprints
from fusedmoe.schedule.policies.sparse_collectives import add_sparse_collectives
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import buckets_after, extract_layer_pass
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.workload import Workload, costs_of_tokens
from fusedmoe.training.gradient_buckets import GradientBuckets, moe_layers
from fusedmoe.training.replicated_parameters import MpLoss

#: Policy that selects the fastest plan: as measured during training (`tune_step`), otherwise as predicted.
AUTO = "auto"


def plan_step(
    model: nn.Module,
    topology: Topology,
    policy: str,
    costs: CostModel | StepCosts | None,
    workload: Workload,
    *,
    limit: int = MAX_DEGREE,
    mp_loss: MpLoss = "summands",
    blocks: PipelinedBlocks | None = None,
) -> tuple[Plan, GradientBuckets]:
    """Plan a training step and apply the plan to the model's MoE layers. Collective over all ranks.

    Blocks in micro-batches (`fusedmoe.pipeline`) follow plans of whole models, including dense parts and weight
    gradients (FlowMoE, Lancet). Other models follow only the plan's chunks and gradient buckets.

        plan, buckets = plan_step(model, topology, "fsmoe", costs, workload)
        …
        buckets.open()
        loss.backward()
        sync_gradients(model, topology, buckets=buckets)

    Args:
        policy: a name in `fusedmoe.schedule.policies.layer_policies`, for blocks in `POLICIES`; or "auto": the plan
            that an earlier job measured to be the fastest here, else the fastest by prediction.
        costs: of this machine, or of this model's steps (`fusedmoe.schedule.refit`), the same on every rank. None:
            measured, or read from the cache (`fusedmoe profile`).
        workload: of one layer; all layers are assumed equal.
        limit: maximum number of chunks per layer and pass.
        mp_loss: as for `sync_gradients`.
        blocks: if they are not a module of the model.
    Returns:
        The plan and its gradient buckets; an empty plan for no chunks and no buckets. If experts migrate, the plan
        includes their sparse collectives.
    Raises:
        ConfigError: an unknown policy; a model without MoE layers, or with layers of other libraries and no costs.
        RankError: ranks derived different plans.
    """
    step = PlannedStep(model, topology, costs, workload, limit=limit, mp_loss=mp_loss, blocks=blocks)
    if not step.has_costs:
        raise ConfigError(
            "plan_step: layers of other libraries, and layers without a workload, are measured during training: use "
            "fusedmoe.training.tune_model"
        )
    return step.follow(step.candidate(policy)), step.buckets


class PlannedStep:
    """Training step that can switch between plans. Construction is collective over all ranks.

    Without costs and workload, and for layers of other libraries, the first forward measures the costs of its batch.
    It also sets `workload` if that is None.

    Args:
        model, topology, costs, workload, limit, mp_loss, blocks: as for `plan_step`.
        samples: batch size, which micro-batches split evenly.
        dense: parameters of the gradient buckets, as for `GradientBuckets`.
    Attributes:
        costs: of a step.
        buckets: reduced by plans during backward.
        has_costs: `costs` is set; False until a forward has measured it.
        has_measured: costs are measured, not passed.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        costs: CostModel | StepCosts | None = None,
        workload: Workload | None = None,
        *,
        limit: int = MAX_DEGREE,
        mp_loss: MpLoss = "summands",
        blocks: PipelinedBlocks | None = None,
        samples: int | None = None,
        dense: Sequence[Sequence[nn.Parameter]] | None = None,
    ) -> None:
        found = [module for module in model.modules() if isinstance(module, PipelinedBlocks)]
        if blocks is None and found:
            blocks = found[0]
        if blocks is not None and len(found) > 1:
            raise ConfigError("plan_step: the model has several pipelines; put all blocks into a single one")
        own_layers = moe_layers(model if blocks is None else blocks)
        # Layers of other libraries reduce their own gradients.
        exchanges = [] if own_layers else exchanges_in(model)
        self._layers: Sequence[MoELayer | ScheduledExchange] = own_layers or exchanges
        if not self._layers:
            raise ConfigError("plan_step: the model has no MoELayer, so there is nothing to plan")
        number_layers(self._layers)
        self._model, self.topology = model, topology
        self._workload, self.has_costs = workload, False
        self.blocks, self.limit, self.samples = blocks, limit, samples
        if dense is None and blocks is not None:
            dense = blocks.dense_parameters
        on = topology if blocks is None else blocks.topology
        if own_layers:
            self.buckets = GradientBuckets(model, on, mp_loss=mp_loss, dense=dense)
        else:
            self.buckets = GradientBuckets(nn.Module(), on, dense=[() for _ in exchanges])
        ep, esp = self._layers[0].topology.ep.size, self._layers[0].topology.esp.size
        sizes = {(layer.topology.ep.size, layer.topology.esp.size) for layer in own_layers}
        if len(sizes) > 1:
            raise ConfigError("plan_step: the layers differ in ep or esp, and a plan is for layers of one topology")
        self._kinds = runnable_kinds(Capabilities(ep, esp), "step")
        self.has_measured = costs is None
        # Blocks in micro-batches do not call their layers' forwards.
        self._measures_in_forward = not own_layers or (costs is None and workload is None and blocks is None)
        if own_layers and self._measures_in_forward:
            # Fail here rather than on all ranks in the first forward.
            self._layers[0].experts.workload(1, 1, ep, esp)
        if costs is None and not self._measures_in_forward:
            costs = self.measured_costs()
        if costs is not None:
            self.set_costs(costs)

    @property
    def workload(self) -> Workload:
        if self._workload is None:
            raise ConfigError(
                "PlannedStep: fusedmoe.pipeline and explicit costs need the workload of a layer: pass workload=…, for "
                "a pipeline workload=blocks.workload(x)"
            )
        return self._workload

    def measured_costs(self, again_s: float | None = None) -> CostModel | None:
        """Return the costs of this machine and the model's first layer, measured or cached. Collective.

        Return None if the next forward will measure them: it knows the batch, and gathers sharded parameters.
        `again_s`: measure again, for about this many seconds.
        """
        first = self._layers[0]
        if isinstance(first, MoELayer) and not self._measures_in_forward:
            costs = first.measured_costs(max(1, self.workload.tokens // self.workload.esp), again_s=again_s)
            return costs_of_tokens(costs, self.workload)
        measurement = self._measurement
        if measurement is None:
            measured: list[CostMeasurement] = []
            for layer in self._layers:
                layer.set_plan(None)
                layer.plans.cost_measurement = CostMeasurement(layer.plans, measured)
        elif measurement.state is MeasurementState.DONE or (
            measurement.state is MeasurementState.TAKEN and not self.has_costs
        ):
            assert measurement.costs is not None and measurement.workload is not None
            measurement.state = MeasurementState.TAKEN
            self._workload = self._workload or measurement.workload
            return costs_of_tokens(measurement.costs, measurement.workload)
        elif measurement.state is MeasurementState.TAKEN:
            measurement.state, measurement.budget_s = MeasurementState.DUE, again_s
        return None

    @property
    def _measurement(self) -> CostMeasurement | None:
        """The measurement of the first layer that has measured, the same on every rank; before that, of any layer."""
        every = (layer.plans.cost_measurement for layer in self._layers)
        found = [one for one in every if isinstance(one, CostMeasurement)]
        return next((one for one in found if one.costs is not None), found[0] if found else None)

    def cancel_measurement(self) -> None:
        measurement = self._measurement
        if measurement is not None and measurement.state is MeasurementState.DUE:
            measurement.state = MeasurementState.TAKEN

    def set_costs(self, costs: CostModel | StepCosts) -> None:
        """Plan with these costs from now on; the same on every rank."""
        workload, blocks = self.workload, self.blocks
        #: Costs of a step, with micro-batches through whole layers where possible; `layer_costs` without them.
        if isinstance(costs, StepCosts):
            self.costs = self.layer_costs = replace(costs, workload=costs.workload or workload)
        else:
            given = self._layers[0].topology, costs, workload, self.buckets
            self.costs = model_costs(blocks, *given)
            self.layer_costs = self.costs if blocks is None else model_costs(None, *given)
        self.has_costs = True

    def predicted(self, candidate: PlanCandidate) -> PlanCandidate:
        return candidate._replace(predicted_s=predicted_s(candidate.plan, self.costs_of(candidate.uses_micro_batches)))

    def costs_of(self, uses_micro_batches: bool) -> StepCosts:
        return self.costs if uses_micro_batches else self.layer_costs

    def candidate(self, policy: str) -> PlanCandidate:
        """Return a policy's plan; for "auto" the cached fastest plan, else the fastest by prediction. Collective.

        Raises:
            ConfigError: an unknown policy, or a policy for whole layers if these cannot be split.
        """
        if policy == AUTO:
            cached = self.cached_choice(AUTO)
            return self.candidates()[0] if cached is None else cached[1][0]
        policies = layer_policies() if self.blocks is None else POLICIES
        if policy not in policies:
            raise ConfigError(
                f"unknown schedule {policy!r}; choose {', '.join((*policies, AUTO))}, or call fusedmoe.register_policy"
            )
        if self.blocks is None or not POLICIES[policy].uses_micro_batches:
            plan = POLICIES[policy].plan(self.costs, self.limit)
        else:
            limits: dict[str, Any] = {"limit": self.limit, "samples": self.samples}
            plan = cached_plans([policy], self.topology, self.costs, **limits)[policy]
        return PlanCandidate(policy, plan, self.blocks is not None, makespan(plan, self.costs))

    def candidates(self) -> list[PlanCandidate]:
        """Return the best runnable plan of each policy, and the empty plan, fastest first by prediction."""
        with ProgressBar("planning") as bar:
            show = bar.show if self.topology.is_first else lambda done, total: None
            found = family_candidates(self.costs, self.limit, self.samples, show)
            if self.layer_costs is not self.costs:
                layers = family_candidates(self.layer_costs, self.limit, None, show)
                found = sort_distinct([*(one for one in found if one.uses_micro_batches), *layers])
            return list(filter(self.is_runnable, found))

    def is_runnable(self, candidate: PlanCandidate) -> bool:
        with suppress(ConfigError):
            self._require_runnable(candidate)
            return True
        return False

    def _require_runnable(self, candidate: PlanCandidate) -> None:
        plan, number = candidate.plan, len(self._layers)
        if candidate.uses_micro_batches:
            if self.blocks is None:
                raise ConfigError("plan_step: plans with micro-batches run in blocks only (fusedmoe.pipeline)")
            self.blocks.require_runnable(split_by_phase(plan), self.buckets)
        elif len(plan):
            require_runnable(plan, self._kinds, f"plan_step: the plan by {candidate.family}")
            forward_degrees, backward_degrees = (
                [plan.degrees.get((phase, n)) for n in range(number)] for phase in PHASES
            )
            if None in forward_degrees or None in backward_degrees or len(plan.degrees) > 2 * number:
                raise ConfigError(f"plan_step: the plan by {candidate.family} does not cover {number} layers")
            if forward_degrees != backward_degrees and not all(map(_supports_any_degree, self._layers)):
                raise ConfigError("plan_step: user-defined expert modules need one degree for both passes")

    def follow(self, candidate: PlanCandidate) -> Plan:
        """Apply a plan to all following steps; return it with the sparse collectives of migrating experts. Collective.

        Raises:
            ConfigError: the plan is not runnable here.
            RankError: ranks derived different plans.
        """
        self._require_runnable(candidate)
        plan = candidate.plan
        if candidate.uses_micro_batches:
            assert self.blocks is not None
            plan = self.blocks.with_copies(plan)
            self.blocks.set_plan(split_by_phase(plan), self.buckets)
            return plan
        if self.blocks is not None:
            self.blocks.set_plan(None)
        # Ranks with different plans would issue collectives in different orders and deadlock.
        self.topology.require_equal_facts({"plan": plan.fingerprint}, "plan of the training step")
        for number, layer in enumerate(self._layers):
            plans = (
                Plans(extract_layer_pass(plan, number, "forward"), extract_layer_pass(plan, number, "backward"))
                if len(plan)
                else None
            )
            layer.set_plan(plans, self.buckets, buckets_after(plan, number))
        moving = {number: one.placed for number, one in enumerate(self._layers) if one.placed is not None}
        for placed in moving.values():
            # Replica transfers between the chunks of a plan would delay the chunks.
            placed.timing = ReplicaTiming.IN_TURNS if len(plan) else ReplicaTiming.EAGER
        # Released replicas are fetched again for backward, except for the last layer's, which runs next.
        again = [number for number, placed in moving.items() if placed.settings.releases_replicas]
        return add_sparse_collectives(plan, moving, again=again[:-1]) if len(plan) else plan

    def choice_path(self, policy: str) -> Path:
        """Return the file of the cached choice for this model and machine. Collective over all ranks."""
        facts = {
            "policy": policy,
            "workload": asdict(self.workload),
            "gradient_bytes": self.costs.gradient_bytes,
            "parameters": [(list(one.shape), str(one.dtype)) for one in self._model.parameters()],
            "whole": self.blocks is not None,
            "recompute": bool(getattr(self._model, "recompute", False)),
            "limit": self.limit,
            "samples": self.samples,
        }
        if policy == AUTO and (own := user_plan_fingerprints(self.layer_costs, self.limit)):
            facts["own"] = own
        first = next(self._model.parameters(), torch.empty(0, device="cpu"))
        return choice_path(self.topology, first.device, first.dtype, facts)

    def cached_choice(self, policy: str, path: Path | None = None) -> tuple[float, list[PlanCandidate]] | None:
        """Return an earlier job's cached choice: step time in seconds, and plans, fastest first. Collective.

        Return None without a choice, or if its fastest plan is not runnable here.
        """
        choice = read_choice(self.topology, self.costs_of, path or self.choice_path(policy))
        if choice is None:
            return None
        seconds, candidates = choice
        # A runner-up must not replace the fastest plan: its time was not cached.
        runnable = list(filter(self.is_runnable, candidates))
        return (seconds, runnable) if runnable[:1] == candidates[:1] else None


def _supports_any_degree(layer: MoELayer | ScheduledExchange) -> bool:
    if isinstance(layer, ScheduledExchange):
        # Determined in a forward: outside of it the parameters may be sharded.
        return isinstance(layer.plans.cost_measurement, CostMeasurement) and layer.plans.cost_measurement.can_rechunk
    return layer.experts.in_chunks(next(layer.experts.parameters(), torch.empty(0, device="cpu"))).can_rechunk


def model_costs(
    blocks: PipelinedBlocks | None, topology: Topology, costs: CostModel, workload: Workload, buckets: GradientBuckets
) -> StepCosts:
    here = Capabilities(topology.ep.size, topology.esp.size)
    kinds = runnable_kinds(here, "step" if blocks is None else "blocks")
    waits = blocks is not None and any(blocks.routes_first)
    return workload.step_costs(costs, buckets.layer_bytes, kinds, whole=blocks is not None, waits=waits)
