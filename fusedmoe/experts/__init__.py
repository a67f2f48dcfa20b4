"""Expert networks, LoRA adapters, and the sharding of expert parameters over ranks.

A custom module declares in its attribute `shardings` which dimensions of its parameters are split over ranks.
"""

from __future__ import annotations

from fusedmoe.experts.adapters import LowRankUpdate, add_adapters, merge_adapters
from fusedmoe.experts.networks import NAMED, Custom, Experts, FeedForward, Place, RowExperts, SwiGLU
from fusedmoe.experts.sharding import parameter_shardings

__all__ = [
    "Custom",
    "Experts",
    "FeedForward",
    "LowRankUpdate",
    "NAMED",
    "Place",
    "RowExperts",
    "SwiGLU",
    "add_adapters",
    "merge_adapters",
    "parameter_shardings",
]
