"""Whole blocks, attention and its MoE layer, in micro-batches that overlap (`fusedmoe.pipeline`)."""
