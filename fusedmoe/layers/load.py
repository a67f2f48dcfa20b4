"""What a layer's forwards routed where."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.layers.gates.base import Routing, SoftRouting


class Load:
    """Slots of one layer on this rank.

    Attributes:
        chosen_E: that chose each expert in the last forward, drops included.
        kept_E: rows that each expert got of them.
    """

    def __init__(self, experts: int) -> None:
        self.chosen_E = torch.zeros(experts, dtype=torch.long)
        self.kept_E = torch.zeros(experts, dtype=torch.long)
        self._sum_E: Tensor | None = None

    def count(self, routing: Routing | SoftRouting, summed: bool) -> None:
        """Another forward. With `summed`, its load is part of what `taken` gives."""
        experts = len(self.chosen_E)
        if isinstance(routing, SoftRouting):
            self.chosen_E = torch.full((experts,), routing.slots, device=routing.combine_SN.device)
            return
        self.chosen_E = expert_load(routing.expert_SK, experts)
        if summed:
            # A new tensor in either case: `chosen_E` is the user's to change.
            self._sum_E = self.chosen_E.clone() if self._sum_E is None else self._sum_E + self.chosen_E

    def taken(self) -> Tensor:
        """[E] int64: the load of forwards with `summed` since it was last taken."""
        sum_E, self._sum_E = self._sum_E, None
        return torch.zeros_like(self.chosen_E) if sum_E is None else sum_E

    def dropped(self) -> int:
        """Slots that got no row. Waits for the device."""
        return int(self.chosen_E.sum() - self.kept_E.sum())


def expert_load(expert_SK: Tensor, experts: int) -> Tensor:
    """[E] int64: slots that chose each expert; no host synchronisation."""
    chosen = expert_SK.reshape(-1)
    chosen = torch.where(chosen < 0, experts, chosen)
    return chosen.new_zeros(experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:experts]
