"""Schedules of a layer: when it sends and when it computes, `MoELayer(…, schedule=…)`.

`Schedule` is the user's choice; `ScheduledPlans` makes its plans as sizes ask for them, by what was measured.
"""

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
from fusedmoe.engine.chunk_experts import ChunkExperts, GroupedExperts
from fusedmoe.engine.one_sided_dispatcher import KernelTransport, choose_transport, has_heap
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans
from fusedmoe.layers.measure import measure_layer, rounded, undisturbed
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.cost import CostModel, Observed
from fusedmoe.schedule.policies import ANY_ORDER, POLICIES, Policy, PolicyFunction, layer_policies, own_policy
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import fused_pass, pass_by_degree, pass_of
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.task import FUSED, PHASES
from fusedmoe.schedule.workload import Workload, one_sided_s, uniform_share

#: The policy of a layer whose kernels send and receive by themselves, where they can and it is shorter. It is for
#: layers by themselves: plans of steps have none of its tasks.
FUSED_POLICY = "fused"

# The policy of "auto".
_AUTO = "joint"


@dataclass(frozen=True)
class Schedule:
    """A way to overlap what a layer sends with what it computes. Results do not depend on it.

    Attributes:
        policy: a name of `fusedmoe.schedule.policies.layer_policies()`, or "fused": kernels that send and receive by
            themselves, where they can and it is shorter, and else the best order of each pass; or your own, a function
            from a `Workload` and `StepCosts` to a `Plan`, or the name that `fusedmoe.register_policy` gave it.
        degrees: chunks forward and backward, of collectives or of kernels that send by themselves; None has the policy
            choose them by `costs`. Experts that are modules of their own need the same in both passes.
        costs: what collectives and products take on this machine, the same on every rank; None: measured when first
            needed, once for each machine (`fusedmoe.runtime.cache`).
        limit: the largest degree that may be chosen.
        puts: kernels may send and receive by themselves, where they can and it is shorter: of "fused" and "auto".
        row_factor: f, of such kernels: memory is for ⌈f·S⌉·K rows that come to a rank's experts (times ESP), S the
            tokens of the rank with most in the first batch, so f times the mean; None: for all that all ranks can send.
            With it nothing waits on the host, and a CUDA graph may hold the layer. A batch that needs more, and router
            logits that are not finite, are told of by a later forward, or by `MoELayer.check`, on all ranks.

    Raises:
        ConfigError: an unknown policy, a degree or `limit` that is no integer of at least 1, or degrees for a policy of
            your own, which chooses them; a `row_factor` that is not positive, or where kernels do not send by
            themselves.
    """

    policy: str | PolicyFunction | Policy = "fsmoe"
    degrees: tuple[int, int] | None = None
    costs: CostModel | None = None
    limit: int = MAX_DEGREE
    puts: bool = False
    row_factor: float | None = None

    def __post_init__(self) -> None:
        if self.policy == FUSED_POLICY:
            object.__setattr__(self, "puts", True)
        if self.row_factor is not None and not (self.puts and 0 < self.row_factor < math.inf):
            text = 'give a positive number, of a schedule with puts=True or policy "fused"'
            raise ConfigError(f"Schedule: row_factor = {self.row_factor}; {text}")
        if not isinstance(self.policy, Policy) and callable(self.policy):
            object.__setattr__(self, "policy", own_policy(self.policy))
        if not isinstance(self.policy, Policy) and self.policy not in _names():
            raise ConfigError(f"unknown policy {self.policy!r}; choose {', '.join(_names())}{_elsewhere(self.policy)}")
        check_count("Schedule", "limit", self.limit, 1)
        if self.degrees is not None:
            require_degrees(self.degrees)
            if self._planned_by.own:
                raise ConfigError(
                    f"Schedule: policy {self._planned_by.name} chooses the chunks itself; leave out degrees"
                )

    @classmethod
    def named(cls, name: str) -> Schedule | None:
        """Returns the schedule of a name: "off" (None), "auto", or a policy, which measures its costs.

        Raises:
            ConfigError: another name.
        """
        if name not in (known := ("off", "auto", *_names())):
            raise ConfigError(f"unknown schedule {name!r}; choose {', '.join(known)}{_elsewhere(name)}")
        if name == "auto":
            return cls(_AUTO, puts=True)
        return None if name == "off" else cls(name)

    @property
    def _planned_by(self) -> Policy:
        if isinstance(self.policy, Policy):
            return self.policy
        return _FUSED if self.policy == FUSED_POLICY else POLICIES[str(self.policy)]

    def plans(
        self,
        kinds: Collection[str],
        workload: Workload | None,
        costs: CostModel | None = None,
        *,
        any_degree: bool = True,
    ) -> Plans:
        """Returns the plans of a layer that runs these kinds of tasks; the same on all ranks for the same arguments.

        Args:
            kinds: those that the layer can run (`fusedmoe.runtime.execute`).
            workload: of the layer on one rank; None where degrees are given.
            costs: where the schedule has none.
            any_degree: the backward pass may have other chunks than the forward pass; else a choice is the forward's.
        """
        policy = self._planned_by
        kind = next((kind for kind in FUSED if kind in kinds), None) if self.puts else None
        if self.degrees is not None:
            made = partial(pass_by_degree, policy.order, kinds) if kind is None else partial(fused_pass, kind)
            return Plans(*map(made, self.degrees, PHASES))
        costs = self.costs or costs
        assert costs is not None and workload is not None
        step_costs = workload.step_costs(costs, [0], kinds)
        plan = policy.plan(step_costs, self.limit)
        fused = None if kind is None else _best_fused(kind, workload, costs, step_costs, self.limit, any_degree)
        if kind is not None and fused is not None and fused.seconds * (1 + ROUNDING) < makespan(plan, step_costs):
            return Plans(*map(partial(fused_pass, kind), fused.degrees, PHASES))
        forward = pass_of(plan, 0, "forward")
        # Modules by autograd keep their graph by chunk, so both passes have the forward's.
        if any_degree or policy.own:
            if not any_degree and len({*plan.degrees.values()}) > 1:
                raise ConfigError(
                    f"policy {policy.name} has other chunks backward than forward; experts that are modules of their "
                    "own need one number for both passes"
                )
            return Plans(forward, pass_of(plan, 0, "backward"))
        return Plans(forward, pass_by_degree(policy.order, kinds, max(forward.degrees.values()), "backward"))

    def __str__(self) -> str:
        name = self._planned_by.name
        return name if self.degrees is None else f"{name} in {self.degrees} chunks"


_FUSED = replace(ANY_ORDER, name=FUSED_POLICY, description="kernels that send and receive by themselves")


def _names() -> tuple[str, ...]:
    """Lists the names of all policies of a layer."""
    return (*layer_policies(), FUSED_POLICY)


class _Fused(NamedTuple):
    """Seconds of both passes of a layer by a fused operation, with so many chunks forward and backward."""

    seconds: float
    degrees: tuple[int, int]


def _best_fused(
    kind: str, workload: Workload, costs: CostModel, step_costs: StepCosts, limit: int, any_degree: bool
) -> _Fused | None:
    """Chooses the numbers of chunks that took the least time here; of an operation that never ran, one chunk, by its
    predicted time. None: nothing is known of the operation.

    Different numbers cost a copy of what the forward pass keeps (`LayerCosts.regroup_s`).
    """
    layer = step_costs.layers[0]
    seen = costs.observed.get(workload.shapes, Observed())
    # Measured for other numbers of rows, scaled to these: fused operations have no line of their own.
    share = 1.0 if seen.rows is None else workload.rows / seen.rows
    ran = [
        _Fused(share * (there_s + back_s) + (0.0 if there == back else layer.regroup_s), (there, back))
        for there, there_s in seen.get(kind, "forward").items()
        for back, back_s in seen.get(kind, "backward").items()
        if max(there, back) <= limit and (any_degree or there == back)
    ]
    if ran:
        return min(ran)
    fused = one_sided_s(kind, workload, costs)
    if fused is None:
        return None
    # Both passes in one chunk: of more, lines say nothing.
    return _Fused(sum(layer.dense_total_s(phase) for phase in PHASES) + sum(fused.values()), (1, 1))


def _elsewhere(name: object) -> str:
    """Says what to do with a name that is another part's."""
    if name in POLICIES and POLICIES[str(name)].whole:
        return (
            f". {name} plans whole models: fusedmoe.pipeline with fusedmoe.training.plan_step, or with Hugging Face "
            f"fusedmoe.hf.pipeline(model, policy={name!r})"
        )
    return '. A layer takes it by name: schedule="auto"' if name == "auto" else ""


def require_degrees(degrees: object) -> None:
    """Raises `ConfigError` unless these are two integers, one for each pass: one for both is a mistake easily made."""
    counts = isinstance(degrees, Sequence) and [type(degree) is int and degree >= 1 for degree in degrees]
    if counts != [True, True]:
        raise ConfigError(f"degrees are the chunks forward and backward, each at least 1: (2, 2), say, not {degrees!r}")


def require_same_plans(topology: Topology, plans: Plans) -> None:
    """Checks that the ranks whose rows meet have the same plans. Collective over ep and esp.

    Raises:
        RankError: they have not; the message, the same on all of them, says who has which.
    """
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
        # Ranks whose rows do not come here wait elsewhere, and hear of it by the board.
        topology.fail(operation, message)
        raise RankError(message)


class ScheduledPlans(LayerPlans):
    """Finds the plans of one layer by its schedule, and whether kernels send and receive by themselves.

    Attributes:
        made: the schedule's plans so far, by what they were made for (None: for any sizes).

    Raises:
        ConfigError: the experts cannot say what they compute, and the schedule has degrees to choose.
    """

    def __init__(self, parts: LayerParts, schedule: Schedule, moves: bool, hooked: bool) -> None:
        super().__init__(parts, moves)
        ep, esp = parts.topology.ep.size, parts.topology.esp.size
        if not isinstance(schedule, Schedule):
            raise ConfigError(
                f"MoELayer: schedule is a {type(schedule).__name__}; give a name, or fusedmoe.Schedule(policy)"
            )
        if schedule.degrees is None:
            if ep * esp == 1:
                # One chunk where nothing travels: there is nothing to choose, nor to measure for it.
                schedule = replace(schedule, policy="sequential", degrees=(1, 1))
            else:
                parts.experts.workload(1, 1, ep, esp)
        self.schedule, self.fuses = schedule, schedule.policy == FUSED_POLICY
        # Nothing but kernels may see rows then: no hooks, no experts that move.
        self.puts, self.limit = schedule.puts and not moves and not hooked, schedule.limit
        self.made: dict[Workload | None, Plans] = {}
        self._costs: dict[tuple[torch.dtype, torch.device], CostModel] = {}
        self._transports: dict[tuple[torch.dtype, torch.device], KernelTransport | None] = {}

    def __str__(self) -> str:
        return str(self.schedule)

    @property
    def plans_nothing(self) -> bool:
        return False

    def find(self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None) -> Assigned | None:
        if self.trial is not None:
            return super().find(x_SM, exchange, in_chunks)
        assigned = self.to_follow()
        if assigned is not None or in_chunks is None:
            return assigned
        workload = self._workload(x_SM, exchange.most_pairs, exchange.share)
        if workload not in self.made:
            any_degree = in_chunks().any_degree
            self.made[workload] = self._plans(x_SM, workload, any_degree, self.kinds, exchange.algorithm)
        return Assigned(self.made[workload])

    def measured(self, like: Tensor, all_to_all: AllToAll | None = None) -> CostModel:
        """Measures this machine and this layer for tokens like these, [S, M]; see `measure_layer`. Collective."""
        return measure_layer(self, like, all_to_all)

    def renew(self, like: Tensor, costs: CostModel) -> None:
        self._costs[like.dtype, like.device] = costs
        self.made.clear()

    def transport(self, x_SM: Tensor) -> KernelTransport | None:
        """Returns how kernels send and receive by themselves; None where collectives do. The first call in a dtype and
        on a device is collective."""
        if self.to_follow() is not None or not self.puts:
            return None
        at = x_SM.dtype, x_SM.device
        if at not in self._transports:
            self._transports[at] = self._choose_transport(x_SM)
        return self._transports[at]

    @undisturbed()
    def _choose_transport(self, x_SM: Tensor) -> KernelTransport | None:
        kind = self.fused_kind(x_SM)
        if kind is None:
            return None

        def plans_for(tokens: int) -> Plans:
            gate = self.parts.gate
            share = uniform_share(gate.experts, gate.k, self.topology.ep.size)
            workload = self._workload(x_SM, tokens * gate.k, share)
            # Plans of grouped experts, as fused operations are.
            return self._plans(x_SM, workload, any_degree=True, kinds=(*self.kinds, kind))

        return choose_transport(self.topology, kind, x_SM, plans_for, self.schedule.row_factor)

    def fused_kind(self, x_SM: Tensor) -> str | None:
        if not self.schedule.puts:
            return None
        capabilities = Capabilities(
            self.topology.ep.size,
            self.topology.esp.size,
            isinstance(self.parts.experts.in_chunks(x_SM), GroupedExperts),
            direct=self.puts,
            dtype=x_SM.dtype,
            device=x_SM.device,
            heap=partial(has_heap, self.topology, x_SM.device),
        )
        return next((kind for kind in runnable_kinds(capabilities, "itself") if kind in FUSED), None)

    def _workload(self, x_SM: Tensor, pairs: int, share: float) -> Workload | None:
        """Returns what a schedule must know; None where it has nothing to choose.

        Args:
            share: tokens that travel for each pair.
        """
        if self.schedule.degrees is not None:
            return None
        ep, esp = self.topology.ep.size, self.topology.esp.size
        workload = self.parts.experts.workload(rounded(pairs), x_SM.dtype.itemsize, ep, esp)
        # Pairs are rounded, so that few sizes are planned; a share rounded as coarsely would say a fourth too much.
        return workload.sending(share)

    @undisturbed()
    def _plans(
        self,
        x_SM: Tensor,
        workload: Workload | None,
        any_degree: bool,
        kinds: tuple[str, ...],
        all_to_all: AllToAll | None = None,
    ) -> Plans:
        """Makes plans of these kinds of tasks. A layer's first call is collective over all ranks where it measures."""
        costs = None
        if self.schedule.degrees is None and self.schedule.costs is None:
            costs = self._costs.get((x_SM.dtype, x_SM.device))
            if costs is None:
                costs = self._costs[x_SM.dtype, x_SM.device] = self.measured(x_SM, all_to_all)
        plans = self.schedule.plans(kinds, workload, costs, any_degree=any_degree)
        require_same_plans(self.topology, plans)
        return plans
