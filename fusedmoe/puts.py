"""Experts over ranks without collectives: kernels put rows into other ranks' memory themselves. Needs Triton.

    from fusedmoe import puts

    with puts.open_heap(topology.ep, device) as heap:
        sizes = puts.BufferSizes(tokens=4096, k=2, experts=64, width=1024, dtype=torch.bfloat16)
        buffers = puts.ReceiveBuffers(heap, sizes)
        y = puts.fused_experts(x, weight_SK, layout, buffers, puts.GroupedExperts(weights, "swiglu"))

`open_heap` gives memory that kernels of all ranks address, `ReceiveBuffers` lie in it and serve one layer after the
other, and `fused_experts` takes tokens to their experts and back; `for_all_shards` is for experts split over ranks.
"""

from __future__ import annotations

from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.kernels.one_sided import for_all_shards

__all__ = ["BufferSizes", "GroupedExperts", "ReceiveBuffers", "for_all_shards", "fused_experts", "open_heap"]
