"""Public facts about torchtitan 0.3 for code outside `fusedmoe.titan`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: First version that was checked, and first that was not.
VERSIONS = ("0.3", "0.4")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is torchtitan's router, without importing torchtitan."""
    return type(module).__name__ == "TokenChoiceTopKRouter"


def chosen_experts(output: Any) -> Tensor:
    """Return the experts [batch, sequence, top-k] in a router's output (weights, indices, scores)."""
    numbers: Tensor = output[1]
    return numbers
