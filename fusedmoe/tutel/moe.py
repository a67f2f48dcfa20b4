"""The layer and its low-level operations."""

from __future__ import annotations

from fusedmoe.tutel.impls.fast_dispatch import (
    extract_critical,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    get_reversed_sample_ids,
    get_topk_selection,
)
from fusedmoe.tutel.impls.moe_layer import MOELayer
from fusedmoe.tutel.jit_kernels.gating import fast_cumsum_sub_one

top_k_routing = extract_critical
moe_layer = MOELayer

__all__ = [
    "MOELayer",
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "get_reversed_sample_ids",
    "get_topk_selection",
    "moe_layer",
    "top_k_routing",
]
