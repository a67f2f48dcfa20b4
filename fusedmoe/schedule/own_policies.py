"""Policies of your own: functions from a layer and its costs to the plan of a step, checked and known by name.

def halves(workload: Workload, costs: StepCosts) -> Plan:
    two = [ChunkedPass(three_queues, 2)] * len(costs.layers)
    return step_plan(costs, two, two)

MoELayer(…, schedule=Schedule(halves))
register_policy("halves", halves)       # and then MoELayer(…, schedule="halves")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.policies import POLICIES, Policy, sequential
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts, gradient_ranges
from fusedmoe.schedule.workload import Workload

#: From a layer as one rank sees it, and what a step of such layers costs, to the step's plan.
PolicyFunction = Callable[[Workload, StepCosts], Plan]

# Names of schedules that are no policies.
_TAKEN = ("off", "auto", "fused")


def register_policy(name: str, function: PolicyFunction) -> None:
    """Gives a policy of your own a name, for `MoELayer(schedule=name)`, `plan_step` and `--schedule` of the command;
    "auto" has its plans among those that it compares. All ranks register the same, before layers are made.

    Args:
        name: an identifier that no schedule of the library has. A name that was registered before gets this function.
        function: from a `Workload`, one of the layers as a rank sees it, and the `StepCosts` of a step of such layers
            to the `Plan` of the step, the same on every rank. `fusedmoe.schedule.step.step_plan` makes plans.
    Raises:
        ConfigError: the name is taken or no identifier, or what is given cannot be called. A plan that lacks a part of
            the step is refused where it is made.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"register_policy: {name!r} is no name; give an identifier, such as 'mine'")
    if name in _TAKEN or (name in POLICIES and not POLICIES[name].own):
        raise ConfigError(f"register_policy: {name!r} is a schedule of the library; give your policy another name")
    if not callable(function):
        raise ConfigError(
            f"register_policy: {name!r} is a {type(function).__name__}; give a function (workload, costs)"
        )
    POLICIES[name] = own_policy(function, name)


def own_policy(function: PolicyFunction, called: str = "") -> Policy:
    """The policy of a function, for layers whose pipelines alone are in chunks.

    Its `plan` raises a `ConfigError` for anything but a plan with all parts of the step.
    """
    called = called or str(getattr(function, "__qualname__", type(function).__qualname__))
    words = ((getattr(function, "__doc__", None) or "").strip().splitlines() or ["your own"])[0].rstrip(".")
    return Policy(called, partial(_plan, function, called), words, True, False, own=True)


def own_plans(costs: StepCosts, limit: int = MAX_DEGREE) -> dict[str, str]:
    """Fingerprints of the plans by all policies that are registered: what is searched or measured among all policies
    depends on them."""
    return {name: policy.plan(costs, limit).fingerprint for name, policy in POLICIES.items() if policy.own}


def _plan(function: PolicyFunction, called: str, costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    if not isinstance(costs.workload, Workload):
        raise ConfigError(f"policy {called} needs costs that say of which layers: Workload.step_costs makes them")
    try:
        plan: object = function(costs.workload, costs)
        if not isinstance(plan, Plan):
            raise ConfigError(f"it gave a {type(plan).__name__}, no Plan; fusedmoe.schedule.step.step_plan makes one")
        _check(plan, costs, limit)
    except ConfigError as error:
        raise ConfigError(f"policy {called}: {error}") from error
    return plan


def _check(plan: Plan, costs: StepCosts, limit: int) -> None:
    """Raises `ConfigError` for a plan that is not of the whole step. That chunks are complete and nothing waits for
    ever, a `Plan` has seen to itself."""
    costs.seconds(plan)
    has = {task._replace(chunk=None, size=None) for task in plan}
    for task in sequential(costs):
        if task.kind != "gradient-all-reduce" and task._replace(chunk=None) not in has:
            raise ConfigError(f"the plan has no {name(task)} ({task.kind}), which is part of the step; add it")
    for (phase, layer), degree in plan.degrees.items():
        if degree > limit:
            raise ConfigError(f"the {phase} pass of layer {layer} goes in {degree} chunks, more than limit = {limit}")
    reduced = sum(map(len, gradient_ranges(plan, costs.gradient_bytes).values()))
    if reduced < (whole := sum(costs.gradient_bytes)):
        raise ConfigError(
            f"the plan reduces {reduced} of {whole} bytes of gradients; end it with a gradient-all-reduce without a "
            "size for each layer that has some left"
        )
