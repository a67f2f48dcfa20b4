"""A whole training step by one plan: every layer's chunks, and gradient all-reduces beside them in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedmoe.blocks.cuts import passes_of
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.measure import CostTrial, Measurement
from fusedmoe.layers.moe import MoELayer, number_layers
from fusedmoe.layers.scheduled_exchange import ScheduledExchange, exchanges_of
from fusedmoe.runtime.cache import cached_plans, choice_path, read_choice
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule.candidates import PlanCandidate, distinct, family_candidates, predicted_s
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies, own_plans
from fusedmoe.schedule.policies.sparse_collectives import add_sparse
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import buckets_after, pass_of
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.workload import Workload, costs_of_tokens
from fusedmoe.training.copies import MpLoss
from fusedmoe.training.gradient_buckets import GradientBuckets, moe_layers

#: The policy that takes what is the fastest here: as measured while a job trained (`tune_step`), else as predicted.
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
    samples: int | None = None,
) -> tuple[Plan, GradientBuckets]:
    """Plans a training step of a model and has its MoE layers follow the plan; collective over all ranks.

    Layers that are blocks in micro-batches (`fusedmoe.pipeline`) follow plans of whole models, with their dense parts
    and weight gradients (FlowMoE, Lancet); others only have the plan's chunks and gradient buckets.

        plan, buckets = plan_step(model, topology, "fsmoe", costs, workload)
        plan, buckets = plan_step(model, topology, "auto", None, blocks.workload(x))  # of fusedmoe.pipeline
        …
        buckets.open()
        loss.backward()
        sync_gradients(model, topology, buckets=buckets)

    Args:
        policy: a name of `fusedmoe.schedule.policies.layer_policies`, for blocks any of `POLICIES` there; or "auto",
            what an earlier job has measured to be the fastest here, else what is so by prediction. `tune_step`
            measures while a job trains.
        costs: of this machine, or of the steps of this model (`fusedmoe.schedule.refit`), the same on every rank; None:
            measured now, or before (`fusedmoe profile`).
        workload: of one of the model's layers, which are taken to be alike.
        limit: the largest degree.
        blocks: where they are no module of the model.
        samples: of a batch of theirs: micro-batches then have equally many.
    Returns:
        The plan of the step, whose tasks that are not of the layers' pipelines follow autograd's order, and the
        gradients that it reduces on the way. A plan without tasks: nothing goes in chunks, nor gradients on the way.
        Where experts move, it has the sparse collectives too, at their place among what the link between nodes has to
        do, whatever they take.
    Raises:
        ConfigError: an unknown policy, or a model without MoE layers.
        RankError: ranks that come to different plans.
    """
    step = PlannedStep(model, topology, costs, workload, limit=limit, mp_loss=mp_loss, blocks=blocks, samples=samples)
    if not step.has_costs:
        raise ConfigError("plan_step: layers of other libraries are measured by fusedmoe.training.tune_model")
    return step.follow(step.candidate(policy)), step.buckets


class PlannedStep:
    """A training step of a model, which can follow one plan after the other. Making one is collective over all ranks.

    Args: as for `plan_step`. Layers of other libraries are measured in a forward, which also provides the
            workload if it is None.
    Attributes:
        costs: of a step.   buckets: of the gradients that plans reduce on the way.   blocks: in micro-batches, if any.
        limit, samples: as given.   has_measured: costs are measured here, not given.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        costs: CostModel | StepCosts | None,
        workload: Workload | None,
        *,
        limit: int = MAX_DEGREE,
        mp_loss: MpLoss = "summands",
        blocks: PipelinedBlocks | None = None,
        samples: int | None = None,
    ) -> None:
        found = [module for module in model.modules() if isinstance(module, PipelinedBlocks)]
        if blocks is None and found:
            blocks = found[0]
        if blocks is not None and len(found) > 1:
            raise ConfigError("plan_step: the model has several pipelines; make one of all its blocks")
        ours = moe_layers(model if blocks is None else blocks)
        # Layers of other libraries, whose gradients are theirs to reduce.
        exchanges = [] if ours else exchanges_of(model)
        self._layers: Sequence[MoELayer | ScheduledExchange] = ours or exchanges
        if not self._layers:
            raise ConfigError("plan_step: the model has no MoELayer, so there is nothing to plan")
        number_layers(self._layers)  # as the plan does, so that tasks and records name the same layers
        self._model, self.topology = model, topology
        self._workload, self._has_costs = workload, False
        self.blocks, self.limit, self.samples = blocks, limit, samples
        dense = None if blocks is None else blocks.dense_parameters
        on = topology if blocks is None else blocks.topology
        if ours:
            self.buckets = GradientBuckets(model, on, mp_loss=mp_loss, dense=dense)
        else:
            self.buckets = GradientBuckets(nn.Module(), on, dense=[() for _ in exchanges])
        here = self._layers[0].topology
        self._kinds = runnable_kinds(Capabilities(here.ep.size, here.esp.size), "step")
        self.has_measured = costs is None
        if costs is None and ours:
            costs = self.measured()
        if costs is not None:
            self.set_costs(costs)

    @property
    def workload(self) -> Workload:
        if self._workload is None:
            raise ConfigError("PlannedStep: costs that are given need the workload of a layer: pass workload=…")
        return self._workload

    @property
    def has_costs(self) -> bool:
        """Return whether plans can be made; false until a forward has measured the layers of another library."""
        return self._has_costs

    def measured(self, again_s: float | None = None) -> CostModel | None:
        """Return the costs of this machine and the model's first layer, measured now or before. Collective.

        None: the next forward measures a layer of another library, whose parameters may be sharded now.

        `again_s`: measure in any case, for about this many seconds.
        """
        first = self._layers[0]
        if isinstance(first, MoELayer):
            costs = first.measured_costs(max(1, self.workload.tokens // self.workload.esp), again_s=again_s)
            return costs_of_tokens(costs, self.workload)
        trial = first.plans.trial
        if not isinstance(trial, CostTrial):
            for exchange in exchanges_of(self._model):
                exchange.set_plan(None)
                exchange.plans.trial = CostTrial(exchange.plans)
        elif trial.state is Measurement.DONE or (trial.state is Measurement.TAKEN and not self.has_costs):
            assert trial.costs is not None and trial.workload is not None
            trial.state = Measurement.TAKEN
            self._workload = self._workload or trial.workload
            return costs_of_tokens(trial.costs, trial.workload)
        elif trial.state is Measurement.TAKEN:
            trial.state, trial.again_s = Measurement.DUE, again_s
        return None

    def cancel_measurement(self) -> None:
        """Withdraw the request of `measured` that no forward has fulfilled yet."""
        first = self._layers[0]
        trial = first.plans.trial if isinstance(first, ScheduledExchange) else None
        if isinstance(trial, CostTrial) and trial.state is Measurement.DUE:
            trial.state = Measurement.TAKEN

    def set_costs(self, costs: CostModel | StepCosts) -> None:
        """Has plans be made by these costs from now on, the same on every rank."""
        workload, blocks = self.workload, self.blocks
        #: Of a step in which micro-batches go through whole layers, where they can; and of one in which they do not.
        if isinstance(costs, StepCosts):
            self.costs = self.layer_costs = replace(costs, workload=costs.workload or workload)
        else:
            given = self._layers[0].topology, costs, workload, self.buckets
            self.costs = model_costs(blocks, *given)
            self.layer_costs = self.costs if blocks is None else model_costs(None, *given)
        self._has_costs = True

    def predicted(self, candidate: PlanCandidate) -> PlanCandidate:
        """Returns a plan with the seconds that it takes by the costs that there are now."""
        return candidate._replace(predicted_s=predicted_s(candidate.plan, self.costs_of(candidate.whole)))

    def costs_of(self, whole: bool) -> StepCosts:
        """Returns the costs of a step by a plan of whole layers, or by one of their pipelines."""
        return self.costs if whole else self.layer_costs

    def candidate(self, policy: str) -> PlanCandidate:
        """Returns the plan by a policy; with "auto" the one that is kept as the fastest, else by prediction.

        Collective over all ranks.

        Raises:
            ConfigError: an unknown policy, or one for whole layers where these cannot be split.
        """
        if policy == AUTO:
            kept = self.kept(AUTO)
            return self.candidates()[0] if kept is None else kept[1][0]
        known = layer_policies() if self.blocks is None else POLICIES
        if policy not in known:
            raise ConfigError(
                f"unknown schedule {policy!r}; choose {', '.join((*known, AUTO))}, or fusedmoe.register_policy one"
            )
        if self.blocks is None or not POLICIES[policy].whole:
            plan = POLICIES[policy].plan(self.costs, self.limit)
        else:
            limits: dict[str, Any] = {"limit": self.limit, "samples": self.samples}
            plan = cached_plans([policy], self.topology, self.costs, **limits)[policy]
        return PlanCandidate(policy, plan, self.blocks is not None, makespan(plan, self.costs))

    def candidates(self) -> list[PlanCandidate]:
        """Lists the best plan of each family by prediction, as far as it runs here; the best one first."""
        with WorkBar("planning") as bar:
            show = bar.show if self.topology.is_first else lambda done, total: None
            found = family_candidates(self.costs, self.limit, self.samples, show)
            if self.layer_costs is not self.costs:
                layers = family_candidates(self.layer_costs, self.limit, None, show)
                found = distinct([*(one for one in found if one.whole), *layers])
            return list(filter(self.runs, found))

    def runs(self, candidate: PlanCandidate) -> bool:
        """Returns whether a plan can run here."""
        with suppress(ConfigError):
            self._require_runnable(candidate)
            return True
        return False

    def _require_runnable(self, candidate: PlanCandidate) -> None:
        plan, number = candidate.plan, len(self._layers)
        if candidate.whole:
            if self.blocks is None:
                raise ConfigError("plan_step: micro-batches go through blocks only (fusedmoe.pipeline)")
            self.blocks.require_runnable(passes_of(plan), self.buckets)
        elif len(plan):
            require_runnable(plan, self._kinds, f"plan_step: the plan by {candidate.family}")
            # Plans of whole layers: each has its chunks forward and backward, and nothing beside them.
            there, back = ([plan.degrees.get((phase, n)) for n in range(number)] for phase in PHASES)
            if None in there or None in back or len(plan.degrees) > 2 * number:
                raise ConfigError(f"plan_step: the plan by {candidate.family} is not of {number} layers")
            if there != back and not all(map(_any_degree, self._layers)):
                raise ConfigError("plan_step: experts that are modules of their own need one degree for both passes")

    def follow(self, candidate: PlanCandidate) -> Plan:
        """Has steps follow this plan from now on; returns it with the sparse collectives of experts that move.

        Collective over all ranks.

        Raises:
            ConfigError: it cannot run here.
            RankError: ranks that come to different plans.
        """
        self._require_runnable(candidate)
        plan = candidate.plan
        # Blocks run attention and experts by one plan; without them only the layers' own passes follow it.
        if candidate.whole:
            assert self.blocks is not None
            plan = self.blocks.with_copies(plan)
            self.blocks.set_plan(passes_of(plan), self.buckets)
            return plan
        if self.blocks is not None:
            self.blocks.set_plan(None)
        # Ranks with other plans would issue their collectives in other orders, and hang.
        self.topology.agree({"plan": plan.fingerprint}, "plan of the training step")
        for number, layer in enumerate(self._layers):
            plans = Plans(pass_of(plan, number, "forward"), pass_of(plan, number, "backward")) if len(plan) else None
            layer.set_plan(plans, self.buckets, buckets_after(plan, number))
        moving = {number: one.placed for number, one in enumerate(self._layers) if one.placed is not None}
        for placed in moving.values():
            # A plan has the say over the link: copies wait for their turn, and do not push in between chunks.
            placed.travel = "in turns" if len(plan) else "at once"
        # Copies that are given back travel again for the backward pass, but for the last layer's, which is next to run.
        again = [number for number, placed in moving.items() if placed.rematerialises]
        return add_sparse(plan, moving, again=again[:-1]) if len(plan) else plan

    def choice_path(self, policy: str) -> Path:
        """Returns the file that keeps what was measured to be the fastest here. Collective over all ranks."""
        facts = {
            "policy": policy,
            "workload": asdict(self.workload),
            "gradient_bytes": self.costs.gradient_bytes,
            "parameters": [(list(one.shape), str(one.dtype)) for one in self._model.parameters()],
            "whole": self.blocks is not None,
            "limit": self.limit,
            "samples": self.samples,
        }
        # A choice among other policies is another choice: users' own ones (`register_policy`) are part of its name.
        if policy == AUTO and (own := own_plans(self.layer_costs, self.limit)):
            facts["own"] = own
        first = next(self._model.parameters(), torch.empty(0, device="cpu"))
        return choice_path(self.topology, first.device, first.dtype, facts)

    def kept(self, policy: str, path: Path | None = None) -> tuple[float, list[PlanCandidate]] | None:
        """Reads the fastest plan as measured by an earlier job: its seconds, and it with the plans after it.

        None where nothing is kept, or the fastest does not run here. Collective over all ranks.
        """
        choice = read_choice(self.topology, self.costs_of, path or self.choice_path(policy))
        if choice is None:
            return None
        seconds, candidates = choice
        # A second best that runs must not pass for the fastest: its seconds were not kept.
        runnable = list(filter(self.runs, candidates))
        return (seconds, runnable) if runnable[:1] == candidates[:1] else None


def _any_degree(layer: MoELayer | ScheduledExchange) -> bool:
    if isinstance(layer, ScheduledExchange):
        # As measured in a forward: elsewhere its parameters need not be whole.
        return isinstance(layer.plans.trial, CostTrial) and layer.plans.trial.any_degree
    return layer.experts.in_chunks(next(layer.experts.parameters(), torch.empty(0, device="cpu"))).any_degree


def model_costs(
    blocks: PipelinedBlocks | None, topology: Topology, costs: CostModel, workload: Workload, buckets: GradientBuckets
) -> StepCosts:
    """Computes the costs of a step of a model's layers, on this topology, or of its blocks, from those of a machine."""
    here = Capabilities(topology.ep.size, topology.esp.size)
    kinds = runnable_kinds(here, "step" if blocks is None else "blocks")
    waits = blocks is not None and any(blocks.waits)
    return workload.step_costs(costs, buckets.layer_bytes, kinds, whole=blocks is not None, waits=waits)
