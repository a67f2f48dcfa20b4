"""Symmetric memory that kernels of all ranks can address, for one-sided puts. Requires Triton.

    with heaps.open_heap(topology.ep, device) as heap:
        sizes = BufferSizes(tokens=4096, k=2, experts=64, width=1024, dtype=torch.bfloat16)
        y_SM = fused_experts(x_SM, weight_SK, layout, ReceiveBuffers(heap, sizes), GroupedExperts(weights, "swiglu"))

`fused_experts` is in `fusedmoe.engine.one_sided_experts`.
"""
