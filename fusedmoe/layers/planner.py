"""The plans that a layer works by: those of its schedule, made as sizes ask for them, or those it was assigned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.hooks import Hooks
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher, Local, LocalExperts, Routed, recomputing
from fusedmoe.engine.run import Assigned, GradientReducer, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.dispatchers import (
    KernelTransport,
    Moving,
    OneSided,
    choose_transport,
    fused_experts,
    has_heap,
    rounded_up,
)
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.layers.expert_networks import Experts
from fusedmoe.layers.gates.base import Gate
from fusedmoe.layers.measure import FUSED_DEGREES, observe_fused, observe_layer
from fusedmoe.layers.orders import Order
from fusedmoe.layers.schedule import Schedule, measured_costs, measured_parts, require_same_plans, undisturbed
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.cost import CostModel, Observed, Sample
from fusedmoe.schedule.task import FUSED, Task
from fusedmoe.schedule.workload import Workload


class Planner:
    """Finds the plans of one layer.

    Attributes:
        schedule: None: nothing goes in chunks, unless plans are assigned.
        assigned: plans to follow, whatever the schedule; they do not go with copies.
        made: the schedule's plans so far, by what they were made for (None: for any sizes).

    Raises:
        ConfigError: the experts cannot say what they compute, and the schedule has degrees to choose.
    """

    def __init__(
        self, topology: Topology, experts: Experts, schedule: Schedule | None, gate: Gate, order: Order
    ) -> None:
        self._topology, self._experts, self._gate, self._order, self._k = topology, experts, gate, order, gate.k
        self._moves = self._direct = False
        ep, esp = topology.ep.size, topology.esp.size
        if not isinstance(schedule, Schedule | None):
            raise ConfigError(
                f"MoELayer: schedule is a {type(schedule).__name__}; give a name, or fusedmoe.Schedule(policy)"
            )
        if schedule is not None and schedule.degrees is None:
            if ep * esp == 1:
                # One chunk where nothing travels: there is nothing to choose, nor to measure for it.
                schedule = replace(schedule, policy="sequential", degrees=(1, 1))
            else:
                experts.workload(1, 1, ep, esp)
        self.schedule = schedule
        self.assigned: Assigned | None = None
        self._followed: Assigned | None = None
        self.made: dict[Workload | None, Plans] = {}
        self._costs: dict[tuple[torch.dtype, torch.device], CostModel] = {}
        self._transports: dict[tuple[torch.dtype, torch.device], KernelTransport | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"assigned": None, "_followed": None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tasks that plans by collectives have."""
        return runnable_kinds(Capabilities(self._topology.ep.size, self._topology.esp.size), "itself")

    def assign(self, plans: Plans | None, gradients: GradientReducer | None, beside: Sequence[Task]) -> None:
        """See `MoELayer.set_plan`."""
        if plans is None:
            self.assigned = None
            return
        for phase, plan in (("forward", plans.forward), ("backward", plans.backward)):
            own = f"MoELayer.set_plan: the {phase} plan"
            require_runnable(plan, (*self.kinds, *(["gradient-all-reduce"] if gradients is not None else [])), own)
            lacks = [kind for kind in self.kinds if kind not in {task.kind for task in plan}]
            if lacks:
                raise ConfigError(f"{own} has no {lacks[0]}, which every chunk of this layer goes through; add it")
        self.assigned = Assigned(plans, gradients, beside)

    @property
    def plans_nothing(self) -> bool:
        """One thing goes after the other."""
        return self.assigned is None and self.schedule is None

    def find(self, x_SM: Tensor, rows: int, experts: LocalExperts) -> Assigned | None:
        """What was assigned, or the schedule's plans, by collectives, for so many rows of the rank that sends the most.
        None: nothing goes in chunks."""
        assigned = self._to_follow()
        if assigned is not None or self.schedule is None:
            return assigned
        workload = self._workload(x_SM, rows)
        if workload not in self.made:
            self.made[workload] = self._plans(x_SM, workload, experts.in_chunks(x_SM).any_degree, self.kinds)
        return Assigned(self.made[workload])

    def _to_follow(self) -> Assigned | None:
        """What was assigned: where activations are computed again, in the forward pass, so that as much is saved."""
        if not recomputing():
            self._followed = self.assigned
        return self._followed

    def dispatcher(self, algorithm: str, hooks: Sequence[Hooks], placed: DynamicExperts | None) -> Dispatcher:
        """What takes rows by these plans. `algorithm`: of all-to-alls.   `placed`: the experts where they move."""
        topology, all_to_all = self._topology, make_all_to_all(algorithm, self._topology)
        if topology.ep.size * topology.esp.size == 1 and not hooks:
            return Local()
        self._moves = placed is not None
        if placed is not None:
            return Moving(placed, topology, all_to_all, self.find, hooks)
        if self.schedule is not None and self.schedule.puts and not hooks:
            self._direct = True
            return OneSided(self.transport, topology, all_to_all, self.find)
        return Collectives(topology, all_to_all, self.find, hooks)

    def measured(self, like: Tensor) -> CostModel:
        """What this machine takes, and the parts of this layer for as many tokens as in `like`, [S, M]; the lines of
        the machine alone where experts move. Collective over all ranks; kept for layers like this one.

        Raises:
            ConfigError: experts that do not say how much they compute.
        """
        topology, experts, gate, order = self._topology, self._experts, self._gate, self._order
        costs = measured_costs(topology, like.device, like.dtype)
        if self._moves:
            return costs
        # Ranks may have different numbers of tokens; all measure by those of the largest.
        tokens = max(all_gather_object(topology.world, len(like), "measuring a layer"))
        like = like.new_empty(max(1, _rounded(tokens)), like.shape[1])
        rows = max(1, round(len(like) * order.rows_per_token(gate, len(like))))
        workload = experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size)
        kind = f"{type(experts).__module__}.{experts.describe()}"
        sizes = [list(parameter.shape) for parameter in experts.parameters()]
        what = {"shapes": workload.shapes, "experts": kind, "sizes": sizes, "gate": repr(gate), "order": repr(order)}
        fused = self._fused_kind(like) if self.schedule is not None and self.schedule.puts else None
        what |= {} if fused is None else {"fused": f"{fused} in {self._fused_degrees}"}

        def observed() -> Observed:
            step = workload.step_costs(costs, [0], self.kinds)
            found = observe_layer(topology, gate, order, experts, like, step)
            if fused is None:
                return found
            # By collectives all of it takes no longer than this.
            enough_s = sum(s for sample, s in found.seconds.items() if sample.chunks == 1)
            return found | Observed(self._fused_seconds(fused, like, rounded_up(tokens), enough_s))

        seen = measured_parts(topology, like.device, like.dtype, {**what, "tokens": len(like)}, observed)
        return replace(costs, observed={workload.shapes: seen})

    def transport(self, x_SM: Tensor) -> KernelTransport | None:
        """How kernels send and receive by themselves; None where collectives do. The first call in a dtype and on a
        device is collective."""
        if self._to_follow() is not None or self.schedule is None or not self.schedule.puts:
            return None
        at = x_SM.dtype, x_SM.device
        if at not in self._transports:
            self._transports[at] = self._choose_transport(x_SM)
        return self._transports[at]

    @undisturbed()
    def _choose_transport(self, x_SM: Tensor) -> KernelTransport | None:
        kind = self._fused_kind(x_SM)
        if kind is None:
            return None

        def plans_for(tokens: int) -> Plans:
            kinds = (*self.kinds, kind)
            # Of grouped experts, as fused operations are.
            return self._plans(x_SM, self._workload(x_SM, tokens * self._k), any_degree=True, kinds=kinds)

        return choose_transport(self._topology, kind, x_SM, plans_for)

    def _fused_kind(self, x_SM: Tensor) -> str | None:
        """The fused operation that takes rows like these; None: none can. Collective where one might."""
        topology = self._topology
        here = Capabilities(
            topology.ep.size,
            topology.esp.size,
            isinstance(self._experts.in_chunks(x_SM), GroupedExperts),
            direct=self._direct,
            dtype=x_SM.dtype,
            device=x_SM.device,
            heap=lambda: has_heap(topology, x_SM.device),
        )
        return next((kind for kind in runnable_kinds(here, "itself") if kind in FUSED), None)

    @property
    def _fused_degrees(self) -> list[int]:
        """Chunks of fused operations that are measured."""
        assert self.schedule is not None
        return [degree for degree in FUSED_DEGREES if degree <= self.schedule.limit]

    def _fused_seconds(self, kind: str, like: Tensor, tokens: int, enough_s: float) -> dict[Sample, float]:
        """What both passes take by a fused operation, for tokens like these, the most of which a rank has."""
        topology, experts = self._topology, self._experts

        def through(routed: Routed, degree: int) -> Tensor:
            x_SM, layout, weight_SK, _ = routed
            assert weight_SK is not None
            transport = KernelTransport(kind, (degree, degree), max(len(like), tokens))
            return fused_experts(x_SM, weight_SK, layout, topology, experts.in_chunks(x_SM), transport, None)

        degrees = self._fused_degrees
        return observe_fused(topology, self._gate, self._order, experts, like, kind, through, degrees, enough_s)

    def _workload(self, x_SM: Tensor, rows: int) -> Workload | None:
        """What a schedule must know; None where it has nothing to choose."""
        assert self.schedule is not None
        if self.schedule.degrees is not None:
            return None
        ep, esp = self._topology.ep.size, self._topology.esp.size
        return self._experts.workload(_rounded(rows), x_SM.dtype.itemsize, ep, esp)

    @undisturbed()
    def _plans(self, x_SM: Tensor, workload: Workload | None, any_degree: bool, kinds: tuple[str, ...]) -> Plans:
        """Plans of such tasks. The first of a layer is collective over all ranks, where it has to be measured for."""
        schedule, topology, costs = self.schedule, self._topology, None
        assert schedule is not None
        if schedule.degrees is None and schedule.costs is None:
            costs = self._costs.get((x_SM.dtype, x_SM.device))
            if costs is None:
                costs = self._costs[x_SM.dtype, x_SM.device] = self.measured(x_SM)
        plans = schedule.plans(kinds, workload, costs, any_degree=any_degree)
        require_same_plans(topology, plans)
        return plans


def _rounded(rows: int) -> int:
    """To three binary digits, up: plans are made for few sizes."""
    step = 1 << max(0, rows.bit_length() - 3)
    return max(1, -(-rows // step) * step)
