"""Public facts about Megatron-core 0.16 to 0.19 for code outside `fusedmoe.megatron`."""

from __future__ import annotations

from torch import nn

#: First version that was checked, and first that was not.
VERSIONS = ("0.16", "0.20")


def is_router(module: nn.Module) -> bool:
    """Return whether a module chooses experts, without importing Megatron."""
    return type(module).__name__ == "TopKRouter" and hasattr(module, "routing")
