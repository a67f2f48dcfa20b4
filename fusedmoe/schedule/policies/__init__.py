"""Policies: the published systems, the search among all of them, and users' own, as functions from costs to a plan.

    plan = POLICIES["fsmoe"].plan(costs)

A policy is pure: the same costs give the same plan, on every rank. All policies order the same tasks; they differ in
which tasks run at the same time, in how many chunks, and in where gradients are reduced. The longer ones have a file
each in this folder. A policy of your own is a function from a layer and its costs:

    def halves(workload: Workload, costs: StepCosts) -> Plan:
        two = [ChunkedPass(three_queues, 2)] * len(costs.layers)
        return step_plan(costs, two, two)

    MoELayer(…, schedule=Schedule(halves))
    register_policy("halves", halves)       # and then MoELayer(…, schedule="halves")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.order_search import improved_order
from fusedmoe.schedule.passes import Order, Partition, alternating, one_queue, one_queue_s, three_queues
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.policies.flowmoe_plans import (
    BUCKETS,
    ROUNDS,
    SplitSearch,
    exposed_by_part,
    joint_split,
    tuned_split,
)
from fusedmoe.schedule.policies.fsmoe_plans import partitioned_plan
from fusedmoe.schedule.policies.lancet_plans import PARTS, lancet_plan
from fusedmoe.schedule.simulate import best_of
from fusedmoe.schedule.step import ChunkedPass, idle_slot_plan, step_plan
from fusedmoe.schedule.step_costs import MAX_DEGREE, LayerCosts, StepCosts, chunk_times, gradient_ranges
from fusedmoe.schedule.task import PHASES, TaskKind
from fusedmoe.schedule.workload import Workload

#: The degrees that Tutel tries.
TUTEL_DEGREES = (1, 2, 4, 8)

#: The size of Lina's gradient buckets.
LINA_BYTES = 30 * 10**6

# Micro-batches that are tried where the number of a batch's samples is not known.
_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)

# Names of schedules that are no policies.
_TAKEN = ("off", "auto", "fused")

#: Computes the plan of a step from a layer as one rank sees it, and from what a step of such layers costs.
PolicyFunction = Callable[[Workload, StepCosts], Plan]

#: Where a policy's gradient all-reduces run: after the backward pass; in places that are chosen between a layer's
#: chunks and beside its dense part; wherever the links between nodes would be idle.
Gradients = Literal["exposed", "partitioned", "idle slots"]

_Function = TypeVar("_Function", bound=Callable[..., Plan])


@dataclass(frozen=True)
class Policy:
    """A policy and its traits. What else depends on a policy looks at these, and never at its name.

    `plan(costs, limit)` returns the plan of a training step, with degrees up to `limit`; a policy of whole layers takes
    `samples` as well (see `PlanSearch`).
    """

    name: str
    # Functions are left out of the repr, which ranks compare: their addresses differ from rank to rank.
    plan: Callable[..., Plan] = field(repr=False)
    description: str
    by_layer: bool = True  # it plans layers of which nothing but the pipelines is in chunks
    whole: bool = False  # micro-batches may go through whole layers, where these can be split (`StepCosts.can_split`)
    order: Order = field(default=one_queue, repr=False)  # of chunks whose number is given (`step.pass_by_degree`)
    gradients: Gradients = "partitioned"
    varies: bool = True  # plans beside its own may be faster, and are worth measuring (`candidates_beside`)
    own: bool = False  # a user registered or gave it


#: Every policy by its name; `register_policy` adds to them.
POLICIES: dict[str, Policy] = {}


def _described(function: Callable[..., Plan], **traits: Any) -> Policy:
    return Policy(function.__name__, function, (function.__doc__ or "").rstrip("."), **traits)


def _policy(**traits: Any) -> Callable[[_Function], _Function]:
    """Puts the function below into `POLICIES` by its name, with these traits and its docstring."""

    def put(function: _Function) -> _Function:
        POLICIES[function.__name__] = _described(function, **traits)
        return function

    return put


@_policy(gradients="exposed", varies=False)
def sequential(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """One chunk, one thing after the other; every layer's gradient at the end (DeepSpeed-MoE)."""
    one = [ChunkedPass(one_queue, 1)] * len(costs.layers)
    return step_plan(costs, one, one, exposed=True)


@_policy(gradients="exposed")
def tutel(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """One communication queue; the better one of Tutel's degrees, for both passes; gradients at the end."""
    both = _one_queue_passes(costs, [degree for degree in TUTEL_DEGREES if degree <= limit])
    return step_plan(costs, both, both, exposed=True)


@_policy(gradients="exposed")
def pipemoe(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """Tutel's plan with one degree for both passes, the best one by a model of all-to-all and experts (PipeMoE)."""
    both = _pipemoe_passes(costs, limit)
    return step_plan(costs, both, both, exposed=True)


@_policy()
def tutel_improved(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """PipeMoE's chunks; each layer's gradient is reduced beside the dense part of the layer that follows backward."""
    both = _pipemoe_passes(costs, limit)
    beside = (*map(float, costs.gradient_bytes[1:]), 0.0)
    return step_plan(costs, both, both, Partition((0.0,) * len(costs.layers), beside))


@_policy(gradients="idle slots")
def lina(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """PipeMoE's chunks; gradients in buckets of 30 MB, whenever the communication queue would be idle (Lina)."""
    both = _pipemoe_passes(costs, limit)
    return idle_slot_plan(costs, both, both, LINA_BYTES)


@_policy()
def fsmoe_no_iio(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """FSMoE with one communication queue: own degrees forward and backward, gradients partitioned."""
    return partitioned_plan(costs, [one_queue], limit)


@_policy(order=three_queues)
def fsmoe(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """Links in a node and between nodes at once, own degrees for both passes, gradients partitioned."""
    return partitioned_plan(costs, [three_queues], limit)


@_policy(by_layer=False, whole=True, gradients="idle slots")
def flowmoe(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Micro-batches through all layers, one degree for both passes; gradients in buckets below all-to-all (FlowMoE)."""
    return PlanSearch(costs, limit, samples).plan("flowmoe")


@_policy(by_layer=False, whole=True, gradients="idle slots", varies=False)
def lancet(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Ranges of layers in micro-batches forward; weight gradients beside communication backward (Lancet)."""
    return PlanSearch(costs, limit, samples).plan("lancet")


@_policy(whole=True, order=three_queues)
def joint(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """The best in simulation of all policies, orders, degrees, gradient buckets and weight gradients."""
    return PlanSearch(costs, limit, samples).plan("joint")


def any_order(costs: StepCosts, limit: int = MAX_DEGREE) -> Plan:
    """FSMoE's plan with the best of all orders for each layer and pass."""
    return partitioned_plan(costs, (three_queues, alternating, one_queue), limit)


#: The family of the best orders: no policy that users choose, but `joint` compares its plans with those of the others.
ANY_ORDER = _described(any_order, order=three_queues)


def _pipemoe_passes(costs: StepCosts, limit: int) -> list[ChunkedPass]:
    # PipeMoE knows no expert sharding: its model has neither all-gather nor reduce-scatter.
    return _one_queue_passes(costs, range(1, limit + 1), all_gather=0.0, reduce_scatter=0.0)


def _one_queue_passes(costs: StepCosts, degrees: Sequence[int], **modelled_s: float) -> list[ChunkedPass]:
    """Returns for each layer the best degree for both passes, where some parts take what a model says."""

    def both_s(layer: LayerCosts, degree: int) -> float:
        times = (chunk_times(layer.chunks[phase], degree)._replace(**modelled_s) for phase in PHASES)
        return sum(one_queue_s(degree, chunk) for chunk in times)

    return [ChunkedPass(one_queue, min(degrees, key=lambda r: both_s(layer, r))) for layer in costs.layers]


def layer_policies() -> tuple[str, ...]:
    """Returns the names of all policies for layers whose pipelines alone are in chunks, registered ones last."""
    return tuple(policy.name for policy in POLICIES.values() if policy.by_layer)


def whole_policies() -> tuple[str, ...]:
    """Returns the names of all policies for micro-batches that go through whole layers, registered ones last."""
    return tuple(policy.name for policy in POLICIES.values() if policy.whole)


class PlanSearch:
    """The plans of one step by all policies, each made when it is first asked for: what they share is searched once.

    FlowMoE, Lancet and the ablation raise `ConfigError` for layers that cannot be split.

    Args:
        limit: the most chunks, and the most micro-batches.
        samples: the samples of a batch; micro-batches then have equally many. None: any number of micro-batches.
        progress: called with how many parts of the search of `joint` are done, and how many it has.
    """

    def __init__(
        self,
        costs: StepCosts,
        limit: int = MAX_DEGREE,
        samples: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._costs, self._limit, self._samples, self._progress = costs, limit, samples, progress
        self._degrees: Sequence[int] = [degree for degree in _DEGREES if degree <= limit]
        if samples is not None:
            self._degrees = [degree for degree in range(1, limit + 1) if samples % degree == 0]
        self._made: dict[str, Plan] = {}
        # Splits that FlowMoE tries, those that `joint` adds in two rounds, the ablation's, and policies.
        degrees, buckets = len(self._degrees), len(BUCKETS)
        self._total = (degrees + buckets) + degrees + 2 * (2 * degrees * buckets + degrees) + (degrees + 1)
        self._total += len(layer_policies()) + 2 + ROUNDS
        self._done = 0
        # What these policies search is shared; all others are planned by their own functions.
        self._shared = {"flowmoe": lambda: self._tuned.plan(), "lancet": self._lancet, "joint": self._joint}

    def plan(self, name: str) -> Plan:
        """Returns the plan by a policy of `POLICIES`."""
        if name not in self._made and name in self._shared:
            self._made[name] = self._shared[name]()
        elif name not in self._made:
            limits = (self._limit, self._samples) if POLICIES[name].whole else (self._limit,)
            self._made[name] = POLICIES[name].plan(self._costs, *limits)
            self._step()
        return self._made[name]

    @cached_property
    def families(self) -> dict[str, Plan]:
        """The plans that `joint` takes the best of, by the policy that they come from; its own split is "joint"."""
        plans = {policy.name: self.plan(policy.name) for policy in POLICIES.values() if not policy.whole}
        plans[ANY_ORDER.name] = any_order(self._costs, self._limit)
        if self._costs.can_split:
            plans |= {policy.name: self.plan(policy.name) for policy in POLICIES.values() if not policy.by_layer}
            split = joint_split(self._tuned, self._costs, self._degrees, self._step)
            plans["joint"] = improved_order(split, self._costs)
        return plans

    @cached_property
    def ablation(self) -> dict[str, Plan]:
        """FlowMoE part by part (Table 5), each plan with all before it: pipelined experts, attention in micro-batches
        as well, all-reduces in buckets of 1 MiB, buckets of the best size."""
        attention, all_reduce = exposed_by_part(self._costs, self._degrees, self._step)
        self._step()
        experts, tuned = self.plan("pipemoe"), self.plan("flowmoe")
        return {"pipelined experts": experts, "attention": attention, "all-reduce": all_reduce, "tuned": tuned}

    @cached_property
    def _tuned(self) -> SplitSearch:
        return tuned_split(self._costs, self._degrees, self._step)

    def _lancet(self) -> Plan:
        plan = lancet_plan(self._costs, [k for k in PARTS if k in self._degrees])
        self._step()
        return plan

    def _joint(self) -> Plan:
        plans = list(self.families.values())
        if self._costs.can_split:
            plans += self.ablation.values()
        best = best_of(plans, self._costs)
        if self._costs.can_split and best != self.families["joint"]:
            best = improved_order(best, self._costs)
        self._done = self._total
        self._step()
        return best

    def _step(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


def register_policy(
    name: str,
    function: PolicyFunction,
    *,
    whole: bool = False,
    gradients: Gradients = "partitioned",
    varies: bool = False,
) -> None:
    """Gives a policy of your own a name, for `MoELayer(schedule=name)`, `plan_step` and `--schedule` of the command;
    "auto" has its plans among those that it compares. All ranks register the same, before layers are made.

    Args:
        name: an identifier that no schedule of the library has. A name that was registered before gets this function.
        function: from a `Workload`, one of the layers as a rank sees it, and the `StepCosts` of a step of such layers
            to the `Plan` of the step, the same on every rank. `fusedmoe.schedule.step.step_plan` makes plans.
        whole: its plans let micro-batches go through whole layers: for `plan_step` of blocks, and no layer by itself.
        gradients: where its plans reduce gradients, so that plans with other chunks beside them do the same.
        varies: its plans have an order of `fusedmoe.schedule.passes`, and plans with other numbers of chunks in that
            order may be faster: "auto" then measures these, too.
    Raises:
        ConfigError: the name is taken or no identifier, or what is given cannot be called.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"register_policy: {name!r} is no name; give an identifier, such as 'mine'")
    if name in _TAKEN or (name in POLICIES and not POLICIES[name].own):
        raise ConfigError(f"register_policy: {name!r} is a schedule of the library; give your policy another name")
    if not callable(function):
        raise ConfigError(
            f"register_policy: {name!r} is a {type(function).__name__}; give a function (workload, costs)"
        )
    POLICIES[name] = own_policy(function, name, by_layer=not whole, whole=whole, gradients=gradients, varies=varies)


def own_policy(function: PolicyFunction, called: str = "", **traits: Any) -> Policy:
    """Returns the policy of a user's function; its `plan` raises `ConfigError` for a plan that lacks a part of the
    step."""
    called = called or str(getattr(function, "__qualname__", type(function).__qualname__))
    words = ((getattr(function, "__doc__", None) or "").strip().splitlines() or ["your own"])[0].rstrip(".")
    return Policy(called, partial(_own_plan, function, called), words, **{"varies": False, **traits}, own=True)


def own_plans(costs: StepCosts, limit: int = MAX_DEGREE) -> dict[str, str]:
    """Returns the fingerprints of the plans by all registered policies, on which what `joint` finds depends."""
    return {
        name: policy.plan(costs, limit).fingerprint
        for name, policy in POLICIES.items()
        if policy.own and (costs.can_split or not policy.whole)
    }


def _own_plan(
    function: PolicyFunction, called: str, costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None
) -> Plan:
    if not isinstance(costs.workload, Workload):
        raise ConfigError(f"policy {called} needs costs that say of which layers: Workload.step_costs makes them")
    try:
        plan: object = function(costs.workload, costs)
        if not isinstance(plan, Plan):
            raise ConfigError(f"it gave a {type(plan).__name__}, no Plan; fusedmoe.schedule.step.step_plan makes one")
        _require_whole_step(plan, costs, limit)
    except ConfigError as error:
        raise ConfigError(f"policy {called}: {error}") from error
    return plan


def _require_whole_step(plan: Plan, costs: StepCosts, limit: int) -> None:
    """Raises `ConfigError` for a plan that is not of the whole step."""
    costs.seconds(plan)  # raises for tasks that these layers do not have
    # `Plan` itself has checked that chunks are complete, so any chunk stands for its part.
    has = {task._replace(chunk=None, size=None) for task in plan}
    for task in sequential(costs):
        if task.kind != TaskKind.GRADIENT_ALL_REDUCE and task._replace(chunk=None) not in has:
            raise ConfigError(f"the plan has no {name(task)} ({task.kind}), which is part of the step; add it")
    for (phase, layer), degree in plan.degrees.items():
        if degree > limit:
            raise ConfigError(f"the {phase} pass of layer {layer} goes in {degree} chunks, more than limit = {limit}")
    reduced, whole = sum(map(len, gradient_ranges(plan, costs.gradient_bytes).values())), sum(costs.gradient_bytes)
    if reduced < whole:
        cure = "end it with a gradient-all-reduce without a size for each layer that has some left"
        raise ConfigError(f"the plan reduces {reduced} of {whole} bytes of gradients; {cure}")
