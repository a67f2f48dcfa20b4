"""Counts of a layer's routing: slots that chose each expert, and rows that it got."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.layers.gates.base import Gate, Routing, SoftRouting
from fusedmoe.layers.routing_counters import RoutingCounters

# Training forwards without `tell`, after which a gate that waits for it says so: more than a step accumulates.
_UNTOLD = 100


class Load:
    """Counts of one layer's slots on this rank.

    Attributes:
        chosen_E: that chose each expert in the last forward, drops included.
        kept_E: rows that each expert got of them.
        counters: adds up what the training forwards were like, for `fusedmoe.metrics`; None: nobody asks.
    """

    def __init__(self, experts: int) -> None:
        self.counters: RoutingCounters | None = None  # of the object itself, as in copies: graphs look where it is
        self.chosen_E = torch.zeros(experts, dtype=torch.long)
        self.kept_E = torch.zeros(experts, dtype=torch.long)
        self._sum_E = torch.zeros(experts, dtype=torch.long)
        self._counts = False
        self._untold = 0  # training forwards since `tell`, where a gate waits for it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"counters": None}  # of copies and pickles nobody collects anything

    def count(self, routing: Routing | SoftRouting, gate: Gate, training: bool) -> None:
        """Counts another forward. In training its load is part of what `tell` tells."""
        experts = len(self.chosen_E)
        self._counts = False
        if isinstance(routing, SoftRouting):
            self.chosen_E = torch.full((experts,), routing.slots, device=routing.combine_SN.device)
            return
        self.chosen_E = expert_load(routing.expert_SK, experts)
        self._counts = self.counters is not None and training and not recomputing()
        if self._counts:
            assert self.counters is not None
            self.counters.choices(routing.expert_SK, self.chosen_E, routing.logits_SE, routing.aux_loss)
        if training and gate.balances and not recomputing():
            # Always a tensor, or compiled layers would need a graph for the first step and one for all others.
            self._sum_E = self._sum_E.to(self.chosen_E.device) + self.chosen_E
            if not torch.compiler.is_compiling():  # a graph would be compiled anew for each number
                self._untold += 1
                if self._untold == _UNTOLD:
                    warnings.warn(
                        f"the {type(gate).__name__} gate balances its experts in MoELayer.update_gate(), which was not "
                        f"called in {_UNTOLD} training forwards, so loads stay as they are: call it on every rank "
                        "after each optimizer step",
                        stacklevel=2,
                    )

    def keep(self, kept_E: Tensor) -> None:
        """Notes the rows, of those that `count` counted, that there was room for."""
        self.kept_E = kept_E
        if self._counts:
            assert self.counters is not None
            self.counters.rows(kept_E)

    def tell(self, gate: Gate, world: Group) -> None:
        """Tells a gate that balances the load of all ranks in training since it was last told. Collective."""
        if gate.balances:
            sum_E, self._sum_E, self._untold = self._sum_E, torch.zeros_like(self._sum_E), 0
            sum_E = sum_E if world.size == 1 else sum_E.to(device_of(world))
            gate.update(all_reduce(world, sum_E, operation="sum of expert loads"))

    def dropped(self) -> int:
        """Slots that got no row. Waits for the device."""
        return int(self.chosen_E.sum() - self.kept_E.sum())


def expert_load(expert_SK: Tensor, experts: int) -> Tensor:
    """[E] int64: slots that chose each expert; no host synchronisation."""
    chosen = expert_SK.reshape(-1)
    chosen = torch.where(chosen < 0, experts, chosen)
    return chosen.new_zeros(experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:experts]
