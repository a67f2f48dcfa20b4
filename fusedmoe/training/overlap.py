"""A whole training step by one plan: every layer's chunks, and gradient all-reduces beside them."""

from __future__ import annotations

from torch import nn

from fusedmoe.autograd.pipeline import Plans
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.layer import beside, pass_of
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.workload import Workload
from fusedmoe.training.replicas import MpLoss
from fusedmoe.training.stream import GradientStream, moe_layers


def plan_step(
    model: nn.Module,
    topology: Topology,
    policy: str,
    costs: CostModel,
    workload: Workload,
    *,
    limit: int = MAX_DEGREE,
    mp_loss: MpLoss = "summands",
) -> tuple[Plan, GradientStream]:
    """Plans a training step of a model and has its MoE layers follow the plan; collective over all ranks.

        plan, stream = plan_step(model, topology, "fsmoe", costs, workload)
        …
        stream.open()
        loss.backward()
        sync_gradients(model, topology, stream=stream)

    Args:
        policy: a name of `fusedmoe.schedule.policies.POLICIES`.
        costs: of this machine, the same on every rank.
        workload: of one of the model's layers, which are taken to be alike.
        limit: the largest degree.
    Returns:
        The plan of the step, whose tasks that are not of the layers' pipelines follow autograd's order, and the
        gradients that it reduces on the way.
    Raises:
        ConfigError: an unknown policy, or a model without MoE layers.
        RankError: ranks that come to different plans.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown schedule {policy!r}; choose {', '.join(POLICIES)}")
    layers = moe_layers(model)
    if not layers:
        raise ConfigError("plan_step: the model has no MoELayer, so there is nothing to plan")
    stream = GradientStream(model, topology, mp_loss=mp_loss)
    step_costs = workload.step_costs(costs, stream.layer_bytes, layers[0].parts)
    plan = POLICIES[policy].plan(step_costs, limit)
    topology.agree({"plan": plan.fingerprint}, "plan of the training step")
    for number, layer in enumerate(layers):
        plans = Plans(pass_of(plan, number, "forward"), pass_of(plan, number, "backward"))
        layer.follow(plans, stream, beside(plan, number))
    return plan, stream
