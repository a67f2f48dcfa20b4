"""The plans of a layer with a schedule, made as sizes ask for them, by what was measured (`layers/measure.py`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusedmoe.comm.exchange import Exchange
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.dispatcher import LocalExperts
from fusedmoe.engine.one_sided_dispatcher import KernelTransport, choose_transport, has_heap
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans
from fusedmoe.layers.measure import measure_layer, rounded
from fusedmoe.layers.schedule import Schedule, require_same_plans, undisturbed
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.task import FUSED
from fusedmoe.schedule.workload import Workload, uniform_share


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
        self.schedule = schedule
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

    def find(self, x_SM: Tensor, exchange: Exchange, experts: LocalExperts) -> Assigned | None:
        assigned = self.to_follow()
        if assigned is not None:
            return assigned
        workload = self._workload(x_SM, exchange.most_pairs, exchange.share)
        if workload not in self.made:
            any_degree = experts.in_chunks(x_SM).any_degree
            self.made[workload] = self._plans(x_SM, workload, any_degree, self.kinds)
        return Assigned(self.made[workload])

    def measured(self, like: Tensor) -> CostModel:
        """Measures this machine and this layer for tokens like these, [S, M]; see `measure_layer`. Collective."""
        return measure_layer(self, like)

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

        return choose_transport(self.topology, kind, x_SM, plans_for)

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
        return replace(workload, share=max(1, round(32 * share)) / 32)

    @undisturbed()
    def _plans(self, x_SM: Tensor, workload: Workload | None, any_degree: bool, kinds: tuple[str, ...]) -> Plans:
        """Makes plans of such tasks. The first of a layer is collective over all ranks, where it has to be measured
        for."""
        costs = None
        if self.schedule.degrees is None and self.schedule.costs is None:
            costs = self._costs.get((x_SM.dtype, x_SM.device))
            if costs is None:
                costs = self._costs[x_SM.dtype, x_SM.device] = self.measured(x_SM)
        plans = self.schedule.plans(kinds, workload, costs, any_degree=any_degree)
        require_same_plans(self.topology, plans)
        return plans
