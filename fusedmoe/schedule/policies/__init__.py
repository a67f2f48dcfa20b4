"""Policies: functions from costs to a plan. Published systems, a search over all of them, and user-defined policies.

    plan = POLICIES["fsmoe"].plan(costs)

A policy is a pure function: equal costs give equal plans on every rank. All policies order the same tasks; they differ
in concurrency, number of chunks, and when gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

from fusedmoe.errors import ConfigError, callable_name, require_parameters
from fusedmoe.schedule.passes import GradientPartition, TaskOrder, alternating, one_queue, one_queue_s, three_queues
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.policies.flowmoe_plans import (
    BUCKETS,
    ROUNDS,
    SplitSearch,
    ablation_plans,
    joint_split,
    search_flowmoe_split,
)
from fusedmoe.schedule.policies.fsmoe_plans import fsmoe_plan
from fusedmoe.schedule.policies.lancet_plans import NUM_MICRO_BATCHES, lancet_plan
from fusedmoe.schedule.simulate import fastest_plan
from fusedmoe.schedule.step import ChunkedPass, idle_slot_plan, step_plan
from fusedmoe.schedule.step_costs import MAX_DEGREE, LayerCosts, StepCosts, chunk_times, gradient_ranges
from fusedmoe.schedule.task import PHASES, TaskKind
from fusedmoe.schedule.task_orders import improved_order
from fusedmoe.schedule.workload import Workload

TUTEL_DEGREES = (1, 2, 4, 8)

#: Bytes of Lina's gradient buckets.
LINA_BYTES = 30 * 10**6

# Numbers of micro-batches to try if the number of samples is unknown.
_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)

# Names of schedules that are not policies.
_RESERVED_NAMES = ("off", "auto", "fused")

#: (workload of one layer per rank, costs of a step of such layers) -> plan of the step.
PolicyFunction = Callable[[Workload, StepCosts], Plan]

#: When a policy reduces gradients (see `register_policy`).
Gradients = Literal["exposed", "partitioned", "idle slots"]

_Function = TypeVar("_Function", bound=Callable[..., Plan])


@dataclass(frozen=True)
class Policy:
    """A scheduling policy: a function from the costs of a training step to its plan, and properties of its plans.

    `plan(costs, max_degree)` returns the plan with at most `max_degree` chunks per layer. A policy with
    `uses_micro_batches` has a third argument, `samples` (see `PlanSearch`).
    """

    name: str
    # Excluded from the repr, which ranks compare: addresses of functions differ between ranks.
    plan: Callable[..., Plan] = field(repr=False)
    description: str
    chunks_only_pipelines: bool = True  # not attention or other dense parts
    uses_micro_batches: bool = False  # they may pass through whole layers, if `StepCosts.can_split`
    order: TaskOrder = field(
        default=one_queue, repr=False
    )  # order for a given number of chunks (`step.pass_by_degree`)
    gradients: Gradients = "partitioned"
    has_variations: bool = True  # variations of its plans may be faster (`neighbour_candidates`)
    is_user_defined: bool = False


#: Policies by name.
POLICIES: dict[str, Policy] = {}


def _make_policy(function: Callable[..., Plan], **traits: Any) -> Policy:
    return Policy(function.__name__, function, (function.__doc__ or "").rstrip("."), **traits)


def _policy(**traits: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function in `POLICIES`, with its docstring as description."""

    def put(function: _Function) -> _Function:
        POLICIES[function.__name__] = _make_policy(function, **traits)
        return function

    return put


@_policy(gradients="exposed", has_variations=False)
def sequential(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """One chunk, no overlap; all gradients at the end (DeepSpeed-MoE)."""
    one = [ChunkedPass(one_queue, 1)] * len(costs.layers)
    return step_plan(costs, one, one, exposed=True)


@_policy(gradients="exposed")
def tutel(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """One communication queue; the best of Tutel's degrees, equal in both passes; gradients at the end."""
    both = _one_queue_passes(costs, [degree for degree in TUTEL_DEGREES if degree <= max_degree])
    return step_plan(costs, both, both, exposed=True)


@_policy(gradients="exposed")
def pipemoe(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """Tutel's plan with the best degree by PipeMoE's model of all-to-all and experts."""
    both = _pipemoe_passes(costs, max_degree)
    return step_plan(costs, both, both, exposed=True)


@_policy()
def tutel_improved(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """PipeMoE's chunks; gradients overlap with the next dense part of the backward pass."""
    both = _pipemoe_passes(costs, max_degree)
    beside = (*map(float, costs.gradient_bytes[1:]), 0.0)
    return step_plan(costs, both, both, GradientPartition((0.0,) * len(costs.layers), beside))


@_policy(gradients="idle slots")
def lina(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """PipeMoE's chunks; gradients in buckets of 30 MB when the communication queue is idle (Lina)."""
    both = _pipemoe_passes(costs, max_degree)
    return idle_slot_plan(costs, both, both, LINA_BYTES)


@_policy()
def fsmoe_no_iio(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """FSMoE with one communication queue: separate degrees per pass, partitioned gradients."""
    return fsmoe_plan(costs, [one_queue], max_degree)


@_policy(order=three_queues)
def fsmoe(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """Concurrent intra-node and inter-node links, separate degrees per pass, partitioned gradients."""
    return fsmoe_plan(costs, [three_queues], max_degree)


@_policy(chunks_only_pipelines=False, uses_micro_batches=True, gradients="idle slots")
def flowmoe(costs: StepCosts, max_degree: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Micro-batches through all layers, one degree; gradient buckets below all-to-all in priority (FlowMoE)."""
    return PlanSearch(costs, max_degree, samples).plan("flowmoe")


@_policy(chunks_only_pipelines=False, uses_micro_batches=True, gradients="idle slots", has_variations=False)
def lancet(costs: StepCosts, max_degree: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Micro-batches over ranges of layers forward; weight gradients overlap communication backward (Lancet)."""
    return PlanSearch(costs, max_degree, samples).plan("lancet")


@_policy(uses_micro_batches=True, order=three_queues)
def joint(costs: StepCosts, max_degree: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Fastest by simulation: all policies' plans, FSMoE's in other orders, a local search over micro-batches."""
    return PlanSearch(costs, max_degree, samples).plan("joint")


def any_order(costs: StepCosts, max_degree: int = MAX_DEGREE) -> Plan:
    """FSMoE's plan with the best order for each layer and pass."""
    return fsmoe_plan(costs, (three_queues, alternating, one_queue), max_degree)


#: Not selectable by users; a candidate of `joint`.
ANY_ORDER = _make_policy(any_order, order=three_queues)


def _pipemoe_passes(costs: StepCosts, max_degree: int) -> list[ChunkedPass]:
    # PipeMoE's model has no expert sharding, hence neither of these collectives.
    return _one_queue_passes(costs, range(1, max_degree + 1), all_gather=0.0, reduce_scatter=0.0)


def _one_queue_passes(costs: StepCosts, degrees: Sequence[int], **modelled_s: float) -> list[ChunkedPass]:
    """Return passes with each layer's best degree, equal in both. `modelled_s`: seconds that replace parts' costs."""

    def both_s(layer: LayerCosts, degree: int) -> float:
        times = (chunk_times(layer.chunks[phase], degree)._replace(**modelled_s) for phase in PHASES)
        return sum(one_queue_s(degree, chunk) for chunk in times)

    return [ChunkedPass(one_queue, min(degrees, key=lambda r: both_s(layer, r))) for layer in costs.layers]


def layer_policies() -> tuple[str, ...]:
    """Return the names of all policies for single layers, registered policies last.

    Their plans for layers that cannot be split chunk only the pipeline from dispatch to combine, not dense parts.
    """
    return tuple(policy.name for policy in POLICIES.values() if policy.chunks_only_pipelines)


def micro_batch_policies() -> tuple[str, ...]:
    """Return the names of all policies with micro-batches through whole layers."""
    return tuple(policy.name for policy in POLICIES.values() if policy.uses_micro_batches)


class PlanSearch:
    """Plans of one step by all policies, computed on demand. Policies share parts of their search.

    `plan("flowmoe")`, `plan("lancet")` and `ablation` (FlowMoE's Table 5) raise `ConfigError` for layers that cannot be
    split (`StepCosts.can_split`).

    Args:
        costs: costs of the step.
        max_degree: maximum number of chunks and of micro-batches.
        samples: samples per batch; only divisors of it are tried as numbers of micro-batches. None: unknown; 1, 2, 3,
            4, 6, 8, 12 and 16 are tried.
        progress: called with the completed and total number of parts of the search of policy "joint".
    """

    def __init__(
        self,
        costs: StepCosts,
        max_degree: int = MAX_DEGREE,
        samples: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._costs, self._max_degree, self._samples, self._progress = costs, max_degree, samples, progress
        self._degrees: Sequence[int] = [degree for degree in _DEGREES if degree <= max_degree]
        if samples is not None:
            self._degrees = [degree for degree in range(1, max_degree + 1) if samples % degree == 0]
        self._plans: dict[str, Plan] = {}
        # Splits of FlowMoE, of two rounds of `joint` and of the ablation; then policies.
        degrees, buckets = len(self._degrees), len(BUCKETS)
        self._num_parts = (degrees + buckets) + degrees + 2 * (2 * degrees * buckets + degrees) + (degrees + 1)
        self._num_parts += len(layer_policies()) + 2 + ROUNDS
        self._num_done = 0
        self._searches = {"flowmoe": lambda: self._tuned.plan(), "lancet": self._lancet, "joint": self._joint}

    def plan(self, name: str) -> Plan:
        if name not in self._plans and name in self._searches:
            self._plans[name] = self._searches[name]()
        elif name not in self._plans:
            limits = (self._max_degree, self._samples) if POLICIES[name].uses_micro_batches else (self._max_degree,)
            self._plans[name] = POLICIES[name].plan(self._costs, *limits)
            self._report_progress()
        return self._plans[name]

    @cached_property
    def joint_candidates(self) -> dict[str, Plan]:
        """The plans among which policy "joint" selects, by policy name; "joint": the plan of its own search."""
        plans = {policy.name: self.plan(policy.name) for policy in POLICIES.values() if not policy.uses_micro_batches}
        plans[ANY_ORDER.name] = any_order(self._costs, self._max_degree)
        if self._costs.can_split:
            plans |= {
                policy.name: self.plan(policy.name) for policy in POLICIES.values() if not policy.chunks_only_pipelines
            }
            split = joint_split(self._tuned, self._costs, self._degrees, self._report_progress)
            plans["joint"] = improved_order(split, self._costs)
        return plans

    @cached_property
    def ablation(self) -> dict[str, Plan]:
        """FlowMoE part by part (Table 5): each plan adds a part to the previous plan."""
        attention, all_reduce = ablation_plans(self._costs, self._degrees, self._report_progress)
        self._report_progress()
        experts, tuned = self.plan("pipemoe"), self.plan("flowmoe")
        return {"pipelined experts": experts, "attention": attention, "all-reduce": all_reduce, "tuned": tuned}

    @cached_property
    def _tuned(self) -> SplitSearch:
        return search_flowmoe_split(self._costs, self._degrees, self._report_progress)

    def _lancet(self) -> Plan:
        plan = lancet_plan(self._costs, [k for k in NUM_MICRO_BATCHES if k in self._degrees])
        self._report_progress()
        return plan

    def _joint(self) -> Plan:
        plans = list(self.joint_candidates.values())
        if self._costs.can_split:
            plans += self.ablation.values()
        best = fastest_plan(plans, self._costs)
        if self._costs.can_split and best != self.joint_candidates["joint"]:
            best = improved_order(best, self._costs)
        self._num_done = self._num_parts
        self._report_progress()
        return best

    def _report_progress(self) -> None:
        self._num_done += 1
        self._progress(min(self._num_done, self._num_parts), self._num_parts)


def register_policy(
    name: str,
    function: PolicyFunction,
    *,
    whole: bool = False,
    gradients: Gradients = "partitioned",
    varies: bool = False,
) -> None:
    """Register a policy for `MoELayer(schedule=name)`, `plan_step` and `--schedule`, and as a candidate of "auto".

    Register the same policies on all ranks, before creating layers.

    Args:
        name: an identifier that is no schedule of the library. A name registered before gets the new function.
        function: returns the `Plan` of a step, equal on all ranks, from a `Workload` (one layer, per rank) and the
            `StepCosts` of a step of such layers. `fusedmoe.schedule.step.step_plan` makes plans.
        whole: its plans run micro-batches through whole layers: for `plan_step` of blocks, not for single layers.
        gradients: when its plans reduce gradients. "exposed": after the backward pass. "partitioned": during and after
            each layer's pipeline. "idle slots": whenever the inter-node link would be idle.
        varies: "auto" may also measure its plans with other numbers of chunks. The plans must use an order of
            `fusedmoe.schedule.passes`.
    Raises:
        ConfigError: the name is taken or not an identifier, or `function` is not callable.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"register_policy: name {name!r} must be an identifier, such as 'mine'")
    if name in _RESERVED_NAMES or (name in POLICIES and not POLICIES[name].is_user_defined):
        raise ConfigError(f"register_policy: {name!r} is a schedule of the library; choose another name")
    if not callable(function):
        raise ConfigError(
            f"register_policy: {name!r} is a {type(function).__name__}; expected a function (workload, costs)"
        )
    POLICIES[name] = user_policy(
        function,
        name,
        chunks_only_pipelines=not whole,
        uses_micro_batches=whole,
        gradients=gradients,
        has_variations=varies,
    )


def user_policy(function: PolicyFunction, called: str = "", **traits: Any) -> Policy:
    """Return the policy of a user's function. Its `plan` raises `ConfigError` if the plan lacks a part of the step."""
    called = called or callable_name(function)
    require_parameters(function, f"policy {called}", "workload", "costs")
    words = ((getattr(function, "__doc__", None) or "").strip().splitlines() or ["your own"])[0].rstrip(".")
    return Policy(
        called,
        partial(_user_plan, function, called),
        words,
        **{"has_variations": False, **traits},
        is_user_defined=True,
    )


def user_plan_fingerprints(costs: StepCosts, max_degree: int = MAX_DEGREE) -> dict[str, str]:
    """Return the fingerprints of all registered policies' plans, on which `joint` depends."""
    return {
        name: policy.plan(costs, max_degree).fingerprint
        for name, policy in POLICIES.items()
        if policy.is_user_defined and (costs.can_split or not policy.uses_micro_batches)
    }


def _user_plan(
    function: PolicyFunction, called: str, costs: StepCosts, max_degree: int = MAX_DEGREE, samples: int | None = None
) -> Plan:
    if not isinstance(costs.workload, Workload):
        raise ConfigError(f"policy {called} needs costs with a workload, as Workload.step_costs returns them")
    try:
        plan: object = function(costs.workload, costs)
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"it returned a {type(plan).__name__}, no Plan; fusedmoe.schedule.step.step_plan makes one"
            )
        _require_whole_step(plan, costs, max_degree)
    except ConfigError as error:
        raise ConfigError(f"policy {called}: {error}") from error
    except Exception as error:
        error.add_note(f"in policy {called}")
        raise
    return plan


def _require_whole_step(plan: Plan, costs: StepCosts, max_degree: int) -> None:
    costs.seconds(plan)  # raises for unknown tasks
    # `Plan` has checked that chunks are complete.
    has = {task._replace(chunk=None, size=None) for task in plan}
    for task in sequential(costs):
        if task.kind != TaskKind.GRADIENT_ALL_REDUCE and task._replace(chunk=None) not in has:
            raise ConfigError(f"the plan lacks {task_name(task)} ({task.kind}); add it")
    for (phase, layer), degree in plan.degrees.items():
        if degree > max_degree:
            raise ConfigError(f"the {phase} pass of layer {layer} has {degree} chunks, more than limit = {max_degree}")
    reduced, whole = sum(map(len, gradient_ranges(plan, costs.gradient_bytes).values())), sum(costs.gradient_bytes)
    if reduced < whole:
        cure = "add a gradient-all-reduce without a size for each layer with remaining bytes"
        raise ConfigError(f"the plan reduces {reduced} of {whole} bytes of gradients; {cure}")
