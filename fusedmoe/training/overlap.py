"""A whole training step by one plan: every layer's chunks, and gradient all-reduces beside them."""

from __future__ import annotations

from torch import nn

from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.pipeline import PipelinedBlocks
from fusedmoe.layers.schedule import measured_costs
from fusedmoe.runtime.plan_cache import cached_plans
from fusedmoe.runtime.runnable import Here, require_runnable, runnable_kinds
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.layer import beside, half, pass_of
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.whole_policies import WHOLE_POLICIES
from fusedmoe.schedule.workload import Workload
from fusedmoe.training.replicas import MpLoss
from fusedmoe.training.stream import GradientStream, moe_layers


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
) -> tuple[Plan, GradientStream]:
    """Plans a training step of a model and has its MoE layers follow the plan; collective over all ranks.

    Layers that are blocks in micro-batches (`fusedmoe.pipeline`) follow plans of whole models, with their dense parts
    and weight gradients (FlowMoE, Lancet); others only have the plan's chunks and gradient pieces.

        plan, stream = plan_step(model, topology, "fsmoe", costs, workload)
        plan, stream = plan_step(model, topology, "joint", None, blocks.workload(x))  # of fusedmoe.pipeline
        …
        stream.open()
        loss.backward()
        sync_gradients(model, topology, stream=stream)

    Args:
        policy: a name of `fusedmoe.schedule.policies.POLICIES`, for blocks also of
            `fusedmoe.schedule.whole_policies.WHOLE_POLICIES`.
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
    known = POLICIES if blocks is None else {**POLICIES, **WHOLE_POLICIES}
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
    stream = GradientStream(model, topology, mp_loss=mp_loss)
    kinds = runnable_kinds(Here(layers[0].topology.ep.size, layers[0].topology.esp.size), "step")
    plan = POLICIES[policy].plan(workload.step_costs(costs, stream.layer_bytes, kinds), limit)
    require_runnable(plan, kinds, f"plan_step: the plan by {policy}")
    topology.agree({"plan": plan.fingerprint}, "plan of the training step")
    for number, layer in enumerate(layers):
        plans = Plans(pass_of(plan, number, "forward"), pass_of(plan, number, "backward"))
        layer.follow(plans, stream, beside(plan, number))
    return plan, stream


def _plan_blocks(
    model: nn.Module,
    blocks: PipelinedBlocks,
    policy: str,
    costs: CostModel,
    workload: Workload,
    limit: int,
    samples: int | None,
    mp_loss: MpLoss,
) -> tuple[Plan, GradientStream]:
    stream = GradientStream(model, blocks.topology, mp_loss=mp_loss, dense=blocks.dense_parameters)
    step_costs = blocks_costs(blocks, costs, workload, stream)
    if policy in WHOLE_POLICIES:
        plan = cached_plans([policy], blocks.topology, step_costs, limit=limit, samples=samples)[policy]
    else:
        plan = POLICIES[policy].plan(step_costs, limit)
    blocks.follow(Plans(half(plan, "forward"), half(plan, "backward")), stream)
    return plan, stream


def blocks_costs(blocks: PipelinedBlocks, costs: CostModel, workload: Workload, stream: GradientStream) -> StackCosts:
    """What a step of these blocks costs by their account of a machine."""
    layer = blocks.experts[0]
    assert isinstance(layer, MoELayer)
    kinds = runnable_kinds(Here(layer.topology.ep.size, layer.topology.esp.size), "blocks")
    return workload.step_costs(costs, stream.layer_bytes, kinds, whole=True, waits=any(blocks.waits))
