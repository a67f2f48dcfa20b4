"""Expert networks, LoRA adapters, and the sharding of expert parameters over ranks."""

from __future__ import annotations

from fusedmoe.experts.adapters import add_adapters, merge_adapters
from fusedmoe.experts.conversion import from_modules
from fusedmoe.experts.networks import Custom, Experts, FeedForward, SwiGLU

__all__ = ["Custom", "Experts", "FeedForward", "SwiGLU", "add_adapters", "from_modules", "merge_adapters"]
