"""Facts about torchtitan for code outside `fusedmoe.titan`, checked against 0.3: no private name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: The first version that was checked, and the first that was not.
VERSIONS = ("0.3", "0.4")


def is_router(module: nn.Module) -> bool:
    """Return whether a module chooses experts, by scores [B, L, E]. Does not import torchtitan."""
    return type(module).__name__ == "TokenChoiceTopKRouter"


def chosen_experts(output: Any) -> Tensor:
    """Return the experts, [B, L, K], in what a router returns: weights, numbers and scores."""
    numbers: Tensor = output[1]
    return numbers
