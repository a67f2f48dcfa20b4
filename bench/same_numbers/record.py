"""Record of one run on one rank, and public names whose location differs between versions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

# Locations of public names, newest first. The first existing one is imported.
PLACES: dict[str, tuple[str, ...]] = {
    "Contention": ("fusedmoe.schedule.cost", "fusedmoe.schedule", "fusedmoe.plans"),
    "CostModel": ("fusedmoe.schedule", "fusedmoe.plans"),
    "LINES": ("fusedmoe.schedule", "fusedmoe.plans"),
    "Line": ("fusedmoe.schedule", "fusedmoe.plans"),
    "PlacementCosts": ("fusedmoe.placement", "fusedmoe.training"),
    "ShardedExperts": ("fusedmoe.training",),
    "open_heap": ("fusedmoe.comm.one_sided.heaps", "fusedmoe.puts"),
}


def public(name: str) -> Any:
    """Import a name of `PLACES` from its location in this version of the library."""
    for place in PLACES[name]:
        try:
            return getattr(import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(PLACES[name])}; add its new place to PLACES in {__file__}")


class Record(dict[str, Tensor]):
    """Tensors of a run by name, as detached copies on the CPU."""

    def note(self, name: str, value: Any) -> None:
        """Add a tensor, a number, or a mapping or sequence of these. None adds a marker for a missing tensor."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.note(f"{name} {key}", item)
            return
        if isinstance(value, list | tuple):
            for number, item in enumerate(value):
                self.note(f"{name} {number}", item)
            return
        if name in self:
            raise ValueError(f"{name!r} is recorded twice")
        if value is None:
            value = torch.empty(0, dtype=torch.bool)
        elif not isinstance(value, Tensor):
            value = torch.tensor(value)
        value = value.detach()
        if hasattr(value, "to_local"):
            value = value.to_local()
        self[name] = value.cpu().clone()

    def gradients(self, module: nn.Module, prefix: str = "") -> None:
        for name, parameter in module.named_parameters():
            self.note(f"{prefix}gradient of {name}", parameter.grad)

    def parameters(self, module: nn.Module, prefix: str = "") -> None:
        for name, parameter in module.named_parameters():
            self.note(f"{prefix}parameter {name}", parameter)
