"""Grouped GEMMs for Hopper with warp specialization: one producer partition loads, two consumer warp groups multiply.

Programs are persistent: loads of the next tile overlap stores of the last. The four launched warps become the first
consumer group.

Rows are sorted by expert: `tiles_ptr` [tiles, 2] int32 has expert and first row of each tile, `used_ptr` their number,
`ends_ptr` [E] the end of each expert's rows. 16-byte copies require a GEMM depth and columns of bulk-stored results in
multiples of 8. Weights must be finite: at the end of the depth, the next expert's weights are multiplied by zero.
"""
