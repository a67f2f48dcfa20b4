"""Plans of a training step by the policies that training could follow, for commands that show and compare them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from fusedmoe.cli.job import Launch, Sizes
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import follows_plan, micro_batch_limit, policy_of, step_costs, why_not_split
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.expert_networks import Place
from fusedmoe.models.block import make_experts
from fusedmoe.runtime.cache import cached_plans
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, WHOLE_POLICIES, layer_policies
from fusedmoe.schedule.step_costs import StepCosts


class Planned(NamedTuple):
    """A plan of a step, and what a step costs by which it was made."""

    plan: Plan
    costs: StepCosts


def policy_followed(settings: Settings, sizes: Sizes) -> str:
    """The policy of the settings; where training follows none, things happen one after the other."""
    return policy_of(settings) if follows_plan(settings, sizes.ep, sizes.esp) else "sequential"


def plans_of(
    settings: Settings,
    launch: Launch,
    sizes: Sizes,
    costs: CostModel,
    *,
    policies: Collection[str] | None = None,
    again: bool = False,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Planned]:
    """The plans of a step by these policies (None: all), or those of them that training could follow, as it would make
    them (`Trainer.set_plan`): of whole models for layers that are split, the others for layers that are not.

    Raises:
        ConfigError: costs that lack what the layout needs.
    """
    policies = POLICIES if policies is None else policies
    layered = step_costs(settings, launch, sizes, costs)
    if not follows_plan(settings, sizes.ep, sizes.esp):
        return {"sequential": Planned(POLICIES["sequential"].plan(layered), layered)}
    whole = [name for name in WHOLE_POLICIES if name in policies and why_not_split(settings) is None]
    by_layer = [name for name in layer_policies() if name in policies and name not in whole]
    found = {name: Planned(POLICIES[name].plan(layered), layered) for name in by_layer}
    if whole:
        split = step_costs(settings, launch, sizes, costs, whole=True)
        limit = micro_batch_limit(settings, sizes.mp)
        made = cached_plans(whole, Topology(), split, samples=limit, again=again, show=show)
        found |= {name: Planned(plan, split) for name, plan in made.items()}
    for name, planned in found.items():
        kinds = runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if name in whole else "step")
        require_runnable(planned.plan, kinds, f"the plan by {name}")
    return found


def expert_bytes(settings: Settings, sizes: Sizes) -> int:
    """Of a rank's share of one expert's parameters, and of their gradients."""
    expert = make_experts(settings.model)
    expert.setup(settings.model.model_dim, Place(shards=sizes.esp), device="meta")
    return sum(p.numel() for p in expert.parameters()) * (8 if settings.dtype == "fp64" else 4)
