"""Products of sorted rows with their experts' matrices, for Hopper: one partition loads, two groups of warps multiply.

Programs stay and take one tile after another (`order`), so that loads of the next tile run while results of the last
are stored. What is loaded goes through a ring of stages (`pipeline`); results leave in columns (`columns`).

Common to the kernels: they are launched with four warps, which become the first group. Rows are sorted by expert;
`tiles_ptr` [tiles, 2] int32 has expert and first row of each tile, `used_ptr` how many there are, `ends_ptr` [E] the
end of each expert's rows. The depth of a product is a multiple of 8, as bulk copies and 16-byte copies take no other,
and so are the columns of results that leave by bulk copies.
Weights are finite: at the end of the depth those of the next expert are multiplied by zero.
"""
