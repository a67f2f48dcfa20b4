"""The plans that a layer works by: those of its schedule, made as sizes ask for them, or those it was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.autograd.pipeline import GradientPieces, Plans
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.by_puts import Way, choose_way, fused_kind
from fusedmoe.layers.experts import Experts
from fusedmoe.layers.schedule import Schedule, measured_costs, require_same_plans
from fusedmoe.schedule.task import PIPELINE, Task
from fusedmoe.schedule.workload import Workload


class Followed(NamedTuple):
    """Plans that a layer follows.

    Attributes:
        gradients: reduces the gradient pieces that the backward plan has, and those `beside` what follows it.
    """

    plans: Plans
    gradients: GradientPieces | None = None
    beside: Sequence[Task] = ()


class Planner:
    """Of one layer.

    Attributes:
        schedule: None: nothing goes in chunks, unless plans are told.
        told: plans to follow, whatever the schedule; they do not go with copies.
        made: the schedule's plans so far, by what they were made for (None: for any sizes).

    Raises:
        ConfigError: the experts cannot say what they compute, and the schedule has degrees to choose.
    """

    def __init__(self, topology: Topology, experts: Experts, schedule: Schedule | None) -> None:
        self._topology = topology
        ep, esp = topology.ep.size, topology.esp.size
        if schedule is not None and schedule.degrees is None:
            if ep * esp == 1:
                # One chunk where nothing travels: there is nothing to choose, nor to measure for it.
                schedule = replace(schedule, degrees=(1, 1))
            else:
                experts.workload(1, 1, ep, esp)
        self.schedule = schedule
        self.told: Followed | None = None
        self.made: dict[Workload | None, Plans] = {}
        self._ways: dict[torch.dtype, Way] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"told": None}

    @property
    def in_chunks(self) -> bool:
        return self.schedule is not None or self.told is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tasks that plans have. Dispatch without peers is one too: hooks may act there."""
        return PIPELINE if self._topology.esp.size > 1 else ("dispatch", "expert", "combine")

    def followed(self, x_SM: Tensor, rows: int, experts: Experts, any_degree: bool) -> Followed:
        """What was told, or the schedule's plans, by collectives, for so many rows of the rank that sends the most."""
        if self.told is not None:
            return self.told
        workload = self._workload(x_SM, rows, experts)
        if workload not in self.made:
            self.made[workload] = self._plans(x_SM, workload, any_degree, self.kinds)
        return Followed(self.made[workload])

    @property
    def asks_for_puts(self) -> bool:
        return self.told is None and self.schedule is not None and self.schedule.policy == "fused"

    def way(self, x_SM: Tensor, k: int, experts: Experts) -> Way | None:
        """How kernels send and receive by themselves; None where collectives do. The first call is collective.

        Args:
            k: experts of a token.
        """
        kind = fused_kind(self._topology, x_SM, experts.in_chunks(x_SM))
        if kind is None:
            return None
        if x_SM.dtype not in self._ways:

            def plans_for(tokens: int) -> Plans:
                workload = self._workload(x_SM, tokens * k, experts)
                return self._plans(x_SM, workload, any_degree=False, kinds=(*self.kinds, kind))

            self._ways[x_SM.dtype] = choose_way(self._topology, kind, x_SM, plans_for)
        way = self._ways[x_SM.dtype]
        return None if way.kind is None else way

    def _workload(self, x_SM: Tensor, rows: int, experts: Experts) -> Workload | None:
        """What a schedule must know; None where it has nothing to choose."""
        assert self.schedule is not None
        if self.schedule.degrees is not None:
            return None
        ep, esp = self._topology.ep.size, self._topology.esp.size
        return experts.workload(_rounded(rows), x_SM.dtype.itemsize, ep, esp)

    def _plans(self, x_SM: Tensor, workload: Workload | None, any_degree: bool, kinds: tuple[str, ...]) -> Plans:
        """Plans of such tasks. The first of a layer is collective over all ranks, where it has to be measured for."""
        schedule, topology, costs = self.schedule, self._topology, None
        assert schedule is not None
        if schedule.degrees is None and schedule.costs is None:
            costs = measured_costs(topology, x_SM.device, x_SM.dtype)
        plans = schedule.plans(kinds, workload, costs, any_degree=any_degree)
        require_same_plans(topology, plans)
        return plans


def _rounded(rows: int) -> int:
    """To three binary digits, up: plans are made for few sizes."""
    step = 1 << max(0, rows.bit_length() - 3)
    return max(1, -(-rows // step) * step)
