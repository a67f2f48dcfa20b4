"""Schedules of a layer (`MoELayer(…, schedule=…)`): the order and overlap of communication and computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_count
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.engine.chunk_experts import ChunkExperts, GroupedExperts
from fusedmoe.engine.one_sided_dispatcher import KernelTransport, choose_transport, has_heap
from fusedmoe.engine.run import AssignedPlans, Plans
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans, PredictedExperts
from fusedmoe.layers.measure import measure_layer, measurement_context, round_rows
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.cost import CostModel, Observed, TaskDurations
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, Policy, PolicyFunction, layer_policies, user_policy
from fusedmoe.schedule.shared_expert import with_shared_expert
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import extract_layer_pass, fused_pass, pass_by_degree
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.task import FUSED, PHASES, TaskKind
from fusedmoe.schedule.workload import Workload, one_sided_s, uniform_share

#: Policy without plans, for a schedule that only sets `wire`.
OFF = "off"
#: Policy of one-sided kernels, if available and faster. Plans of whole steps have no fused tasks.
FUSED_POLICY = "fused"

_AUTO, _AUTO_POLICY = "auto", "joint"


@dataclass(frozen=True)
class Schedule:
    """How a layer overlaps communication with computation. Results do not depend on it.

    Attributes:
        policy: a name of `fusedmoe.schedule.policies.layer_policies()`; "fused", one-sided kernels if available and
            faster, otherwise the best order of each pass; your own function from a `Workload` and `StepCosts` to a
            `Plan`, or the name under which `fusedmoe.register_policy` registered it. "auto" with a `wire`: the best
            plan of collectives; "off": no plan.
        degrees: numbers of chunks, forward and backward, for collectives or one-sided kernels; None: the policy chooses
            them by `costs`. Experts that are custom modules need the same number in both passes.
        costs: costs of collectives and products on this machine, the same on every rank; None: measured when first
            needed, once per machine (`fusedmoe.runtime.cache`).
        limit: maximum number of chunks that the policy may choose.
        puts: allow one-sided kernels if available and faster; set by "fused" and "auto".
        row_factor: f, for one-sided kernels: allocate ⌈f·S⌉·K rows (times ESP) for a rank's experts, where S is the
            largest number of tokens of a rank in the first batch; None: allocate for all rows that all ranks can send.
            With it the host never synchronizes, and a CUDA graph can capture the layer. A batch that needs more rows,
            and non-finite router logits, are reported on all ranks by a later forward or by `MoELayer.check`.
        wire: format of rows between ranks. None or "bf16": the tensors' own dtype. "fp8": tokens, and in backward the
            gradients of results, are sent as float8_e4m3fn with a scale per token and 128 columns; results, and in
            backward the gradients of tokens, in their own dtype. "fp8-both": these, too, in fp8. Outputs and gradients
            change by 3 to 5 %, equally with every policy.

    Raises:
        ConfigError: unknown policy or `wire`; a degree or `limit` < 1; degrees with "off", or with your own policy,
            which chooses them; `row_factor` that is not positive, or without `puts`; a `wire` with one-sided kernels.
    """

    policy: str | PolicyFunction | Policy = "fsmoe"
    degrees: tuple[int, int] | None = None
    costs: CostModel | None = None
    limit: int = MAX_DEGREE
    puts: bool = False
    row_factor: float | None = None
    wire: str | None = None

    def __post_init__(self) -> None:
        if find_wire_format(self.wire) is None:
            object.__setattr__(self, "wire", None)
        elif self.policy == FUSED_POLICY or self.puts:
            raise ConfigError(
                f"Schedule: one-sided kernels put rows in the tensors' own dtype, not in wire={self.wire!r}: leave out "
                'wire, or use collectives (policy "auto", "fsmoe", …, without puts)'
            )
        elif self.policy == _AUTO:
            object.__setattr__(self, "policy", _AUTO_POLICY)
        if self.policy == OFF:
            if self.degrees is not None or self.row_factor is not None or self.puts:
                raise ConfigError('Schedule: policy "off" has neither chunks nor one-sided kernels; name a policy')
            return
        if self.policy == FUSED_POLICY:
            object.__setattr__(self, "puts", True)
        if self.row_factor is not None and not (self.puts and 0 < self.row_factor < math.inf):
            text = 'give a positive number, of a schedule with puts=True or policy "fused"'
            raise ConfigError(f"Schedule: row_factor = {self.row_factor}; {text}")
        if not isinstance(self.policy, Policy) and callable(self.policy):
            object.__setattr__(self, "policy", user_policy(self.policy))
        if not isinstance(self.policy, Policy) and self.policy not in _schedule_names():
            raise ConfigError(
                f"unknown policy {self.policy!r}; choose {', '.join(_schedule_names())}{_policy_hint(self.policy)}"
            )
        check_count("Schedule", "limit", self.limit, 1)
        if self.degrees is not None:
            require_degrees(self.degrees)
            if self._policy_object.is_user_defined:
                raise ConfigError(
                    f"Schedule: policy {self._policy_object.name} chooses the chunks itself; leave out degrees"
                )

    @classmethod
    def named(cls, name: str) -> Schedule | None:
        """Return the schedule of a name: "off" (None), "auto", or a policy. Raise `ConfigError` for other names."""
        if name not in (known := ("off", "auto", *_schedule_names())):
            raise ConfigError(f"unknown schedule {name!r}; choose {', '.join(known)}{_policy_hint(name)}")
        if name == "auto":
            return cls(_AUTO_POLICY, puts=True)
        return None if name == "off" else cls(name)

    @property
    def _policy_object(self) -> Policy:
        if isinstance(self.policy, Policy):
            return self.policy
        return _FUSED_KERNELS if self.policy == FUSED_POLICY else POLICIES[str(self.policy)]

    def plans(
        self,
        kinds: Collection[str],
        workload: Workload | None,
        costs: CostModel | None = None,
        *,
        can_rechunk: bool = True,
    ) -> Plans:
        """Return the plans of a layer with these task kinds; the same on all ranks for the same arguments.

        Args:
            kinds: task kinds that the layer can run (`fusedmoe.runtime.execute`).
            workload: of the layer on one rank; None if the schedule has degrees.
            costs: used if the schedule has none.
            can_rechunk: backward may have another number of chunks than forward.
        """
        policy = self._policy_object
        kind = next((kind for kind in FUSED if kind in kinds), None) if self.puts else None
        if self.degrees is not None:
            made = partial(pass_by_degree, policy.order, kinds) if kind is None else partial(fused_pass, kind)
            return Plans(*map(made, self.degrees, PHASES))
        costs = self.costs or costs
        assert costs is not None and workload is not None
        step_costs = workload.step_costs(costs, [0], kinds)
        plan = policy.plan(step_costs, self.limit)
        fused = None if kind is None else _best_fused(kind, workload, costs, step_costs, self.limit, can_rechunk)
        if kind is not None and fused is not None and fused.seconds * (1 + ROUNDING) < makespan(plan, step_costs):
            return Plans(*map(partial(fused_pass, kind), fused.degrees, PHASES))
        forward = extract_layer_pass(plan, 0, "forward")
        # Experts by autograd save one graph per chunk, so both passes need the same chunks.
        if can_rechunk or policy.is_user_defined:
            if not can_rechunk and len({*plan.degrees.values()}) > 1:
                raise ConfigError(
                    f"policy {policy.name} has other chunks backward than forward; experts that are modules of their "
                    "own need one number for both passes"
                )
            return Plans(forward, extract_layer_pass(plan, 0, "backward"))
        return Plans(forward, pass_by_degree(policy.order, kinds, max(forward.degrees.values()), "backward"))

    def __str__(self) -> str:
        name = OFF if self.policy == OFF else self._policy_object.name
        name = name if self.wire is None else f"{name}, {self.wire}"
        return name if self.degrees is None else f"{name} in {self.degrees} chunks"


_FUSED_KERNELS = replace(ANY_ORDER, name=FUSED_POLICY, description="kernels that send and receive by themselves")


def _schedule_names() -> tuple[str, ...]:
    return (*layer_policies(), FUSED_POLICY)


class _FusedChoice(NamedTuple):
    """Numbers of chunks of a fused operation, forward and backward, and the time of both passes."""

    seconds: float
    degrees: tuple[int, int]


def _best_fused(
    kind: str, workload: Workload, costs: CostModel, step_costs: StepCosts, limit: int, can_rechunk: bool
) -> _FusedChoice | None:
    """Return a fused operation's fastest measured numbers of chunks; one chunk, by prediction, if none was measured.

    None: the operation has no costs.
    """
    layer = step_costs.layers[0]
    seen = costs.observed.get(workload.shapes, Observed())
    # Scaled from the measured number of rows: fused operations have no fitted cost model.
    share = 1.0 if seen.rows is None else workload.rows / seen.rows
    ran = [
        _FusedChoice(share * (there_s + back_s) + (0.0 if there == back else layer.rechunk_s), (there, back))
        for there, there_s in seen.get(kind, "forward").items()
        for back, back_s in seen.get(kind, "backward").items()
        if max(there, back) <= limit and (can_rechunk or there == back)
    ]
    if ran:
        return min(ran)
    fused = one_sided_s(kind, workload, costs)
    if fused is None:
        return None
    # One chunk per pass: the cost model has no prediction for more.
    return _FusedChoice(sum(layer.dense_total_s(phase) for phase in PHASES) + sum(fused.values()), (1, 1))


def _policy_hint(name: object) -> str:
    if name in POLICIES and POLICIES[str(name)].uses_micro_batches:
        return (
            f". {name} plans whole models: fusedmoe.pipeline with fusedmoe.training.plan_step, or with Hugging Face "
            f"fusedmoe.hf.pipeline(model, policy={name!r})"
        )
    return '. A layer takes it by name: schedule="auto"' if name == "auto" else ""


def require_degrees(degrees: object) -> None:
    """Raise `ConfigError` unless `degrees` are two positive integers, forward and backward."""
    counts = isinstance(degrees, Sequence) and [type(degree) is int and degree >= 1 for degree in degrees]
    if counts != [True, True]:
        raise ConfigError(f"degrees are the chunks forward and backward, each at least 1: (2, 2), say, not {degrees!r}")


def require_same_plans(topology: Topology, plans: Plans) -> None:
    """Raise `RankError` if ranks of ep and esp have different plans, naming the ranks. Collective over ep and esp."""
    operation = "comparing plans"
    own = {topology.rank: f"{plans.forward.fingerprint} forward, {plans.backward.fingerprint} backward"}
    for group in (topology.ep, topology.esp):
        every = all_gather_object(group, own, operation)
        own = {rank: found for ranks in every for rank, found in ranks.items()}
    holders: dict[str, list[int]] = {}
    for rank, found in sorted(own.items()):
        holders.setdefault(found, []).append(rank)
    if len(holders) > 1:
        found = " but ".join(f"{found} on ranks {ranks}" for found, ranks in holders.items())
        message = (
            f"the ranks plan differently: {found}. Plans follow from the schedule and its costs: give the same on "
            "every rank, and the same versions of this library, NumPy and SciPy"
        )
        # Other ranks wait in other operations and read the error from the failure board.
        topology.fail(operation, message)
        raise RankError(message)


def with_wire(schedule: str | Schedule, wire: str | None) -> str | Schedule:
    """Return the schedule with the format `wire` of rows; None: unchanged."""
    if wire is None:
        return schedule
    if isinstance(schedule, Schedule):
        return replace(schedule, wire=wire)
    return schedule if find_wire_format(wire) is None else Schedule(schedule, wire=wire)


class ScheduledPlans(LayerPlans):
    """Provides the plans of one layer from its schedule, and decides on one-sided kernels.

    Raises:
        ConfigError: the experts do not describe their workload, and the schedule has degrees to choose.
    """

    def __init__(self, parts: LayerParts, schedule: Schedule, is_placed: bool, has_hooks: bool) -> None:
        super().__init__(parts, is_placed)
        ep, esp = parts.topology.ep.size, parts.topology.esp.size
        if not isinstance(schedule, Schedule):
            raise ConfigError(
                f"MoELayer: schedule is a {type(schedule).__name__}; give a name, or fusedmoe.Schedule(policy)"
            )
        if schedule.degrees is None:
            if ep * esp == 1:
                # One rank has no communication: one chunk, nothing to choose or measure.
                schedule = replace(schedule, policy="sequential", degrees=(1, 1))
            else:
                parts.experts.workload(1, 1, ep, esp)
        self.schedule, self.requires_puts = schedule, schedule.policy == FUSED_POLICY
        self.limit, self._schedule_puts = schedule.limit, schedule.puts
        # One-sided kernels call no hooks and do not support dynamic placement.
        self._supports_puts = not is_placed and not has_hooks
        self.set_wire(schedule.wire)
        self.plans_by_workload: dict[Workload | None, Plans] = {}
        self._costs: dict[tuple[torch.dtype, torch.device], CostModel] = {}
        self._transports: dict[tuple[torch.dtype, torch.device], KernelTransport | None] = {}

    def __str__(self) -> str:
        if not self.plans_by_workload or self.schedule.degrees is not None:
            return str(self.schedule)
        *_, last = self.plans_by_workload.values()
        idle = "" if last.forward.overlaps or last.backward.overlaps else ", no overlap: equivalent to off"
        return f"{self.schedule} in {last.degrees} chunks{idle}"

    def set_wire(self, wire: str | None) -> None:
        # "auto" considers one-sided kernels only while rows keep their dtype.
        puts = self._schedule_puts and find_wire_format(wire) is None
        self.schedule, self.puts = replace(self.schedule, wire=wire, puts=puts), puts and self._supports_puts
        super().set_wire(wire)

    @property
    def can_plan(self) -> bool:
        return True

    def find_plans(
        self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None
    ) -> AssignedPlans | None:
        if self.cost_measurement is not None:
            return super().find_plans(x_SM, exchange, in_chunks)
        assigned = self.assigned_plans()
        if assigned is not None or in_chunks is None:
            return assigned
        workload = self._workload(x_SM, exchange.max_pairs, exchange.tokens_per_pair)
        if workload not in self.plans_by_workload:
            can_rechunk = in_chunks().can_rechunk
            self.plans_by_workload[workload] = self._make_plans(
                x_SM, workload, can_rechunk, self.kinds, exchange.algorithm
            )
        return AssignedPlans(self.plans_by_workload[workload])

    def measure_costs(self, like: Tensor, all_to_all: AllToAll | None = None) -> CostModel:
        return measure_layer(self, like, all_to_all)

    def set_shared(self, shared: PredictedExperts) -> None:
        if self.shared is None:
            self.plans_by_workload.clear()
        super().set_shared(shared)

    def set_costs(self, like: Tensor, costs: CostModel) -> None:
        self._costs[like.dtype, like.device] = costs
        self.plans_by_workload.clear()

    def transport(self, x_SM: Tensor) -> KernelTransport | None:
        """Return the fused operation for rows like `x_SM`; None: collectives. Collective once per dtype and device."""
        if self.cost_measurement is not None or self.assigned_plans() is not None or not self.puts:
            return None
        at = x_SM.dtype, x_SM.device
        if at not in self._transports:
            self._transports[at] = self._choose_transport(x_SM)
        return self._transports[at]

    @measurement_context()
    def _choose_transport(self, x_SM: Tensor) -> KernelTransport | None:
        kind = self.fused_kind(x_SM)
        if kind is None:
            return None

        def plans_for(tokens: int) -> Plans:
            gate = self.parts.gate
            share = uniform_share(gate.experts, gate.k, self.topology.ep.size)
            workload = self._workload(x_SM, tokens * gate.k, share)
            # Fused operations require grouped experts.
            return self._make_plans(x_SM, workload, can_rechunk=True, kinds=(*self.kinds, kind))

        return choose_transport(self.topology, kind, x_SM, plans_for, self.schedule.row_factor)

    def fused_kind(self, x_SM: Tensor) -> str | None:
        if not self.schedule.puts:
            return None
        capabilities = Capabilities(
            self.topology.ep.size,
            self.topology.esp.size,
            isinstance(self.parts.experts.in_chunks(x_SM), GroupedExperts),
            is_kernel_only=self.puts,
            dtype=x_SM.dtype,
            device=x_SM.device,
            has_heap=partial(has_heap, self.topology, x_SM.device),
        )
        return next((kind for kind in runnable_kinds(capabilities, "itself") if kind in FUSED), None)

    def _workload(self, x_SM: Tensor, pairs: int, share: float) -> Workload | None:
        """Return the workload for which to plan; None if the schedule has degrees. `share`: tokens sent per pair."""
        if self.schedule.degrees is not None:
            return None
        ep, esp = self.topology.ep.size, self.topology.esp.size
        workload = self.parts.experts.workload(round_rows(pairs), x_SM.dtype.itemsize, ep, esp)
        # Pairs are rounded so that few sizes are planned; rounding the share would add an error of up to a quarter.
        return self.encoded(workload.sending(share))

    def _with_shared_expert(
        self, plans: Plans, workload: Workload | None, costs: CostModel | None, kinds: Collection[str], x_SM: Tensor
    ) -> Plans:
        """Return the plans with the shared expert; with costs, at the position with the shortest predicted pass."""
        assert self.shared is not None
        if workload is None or costs is None:
            return Plans(*(with_shared_expert(plans.of(phase), phase) for phase in PHASES))
        layer = workload.step_costs(costs, [0], kinds)
        tokens = max(1, round(workload.rows / workload.esp / self.parts.gate.k))
        alone = self.shared.workload(tokens, x_SM.dtype.itemsize, 1, 1).layer_costs(costs)
        found = []
        for phase in PHASES:
            plan, shared = plans.of(phase), alone.chunks[phase][TaskKind.EXPERT]
            known = TaskDurations(layer.seconds(plan), layer.contention)
            found.append(with_shared_expert(plan, phase, known, shared.seconds))
        return Plans(*found)

    @measurement_context()
    def _make_plans(
        self,
        x_SM: Tensor,
        workload: Workload | None,
        can_rechunk: bool,
        kinds: tuple[str, ...],
        all_to_all: AllToAll | None = None,
    ) -> Plans:
        """Make plans of these task kinds. Collective over ep and esp; over all ranks if it measures costs."""
        costs = None
        if self.schedule.degrees is None and self.schedule.costs is None:
            costs = self._costs.get((x_SM.dtype, x_SM.device))
            if costs is None:
                costs = self._costs[x_SM.dtype, x_SM.device] = self.measure_costs(x_SM, all_to_all)
        plans = self.schedule.plans(kinds, workload, costs, can_rechunk=can_rechunk)
        if self.shared is not None:
            plans = self._with_shared_expert(plans, workload, self.schedule.costs or costs, kinds, x_SM)
        require_same_plans(self.topology, plans)
        return plans
