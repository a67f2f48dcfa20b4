"""The layer and its low-level operations."""

from fusedmoe.tutel.impls.fast_dispatch import extract_critical as extract_critical
from fusedmoe.tutel.impls.fast_dispatch import fast_decode as fast_decode
from fusedmoe.tutel.impls.fast_dispatch import fast_dispatcher as fast_dispatcher
from fusedmoe.tutel.impls.fast_dispatch import fast_encode as fast_encode
from fusedmoe.tutel.impls.fast_dispatch import get_reversed_sample_ids as get_reversed_sample_ids
from fusedmoe.tutel.impls.fast_dispatch import get_topk_selection as get_topk_selection
from fusedmoe.tutel.impls.moe_layer import MOELayer
from fusedmoe.tutel.jit_kernels.gating import fast_cumsum_sub_one as fast_cumsum_sub_one

top_k_routing = extract_critical
moe_layer = MOELayer
