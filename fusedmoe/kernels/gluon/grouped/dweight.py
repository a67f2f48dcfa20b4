"""out_e = Σ over the rows n of expert e of left[n]ᵀ·right[n]: a product of ragged depth, one side's rows looked up.

The other side comes by bulk copies, but for an expert's last rows where they do not fill a step: a box would run into
rows that are another expert's, or that nobody has written. There both sides come by copies of threads, zero past the
end. An expert without rows has no step, and gets zeros. Gradients of other rows may be added on the way out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import store_tile
from fusedmoe.kernels.gluon.grouped.gathered import copied_layout, end_step, end_steps
from fusedmoe.kernels.gluon.grouped.pipeline import announce, await_empty, blocks, fill, make_ring, multiply, place


@gluon.jit
def _locate(tile, table, GROUP: gl.constexpr):
    """Expert of a tile, its first row and the end of its rows, and the tile's place in its matrix."""
    starts_ptr, _, n_row_tiles, n_col_tiles = table
    of_expert = n_row_tiles * n_col_tiles
    expert = tile // of_expert
    row_tile, col_tile = place(tile % of_expert, n_row_tiles, n_col_tiles, GROUP)
    return expert, gl.load(starts_ptr + expert), gl.load(starts_ptr + expert + 1), row_tile, col_tile


@gluon.jit
def _tiles_in(table):
    _, experts, n_row_tiles, n_col_tiles = table
    return experts * n_row_tiles * n_col_tiles


@gluon.jit
def _copy_rows(buf, ptr, row, inside, first_column, COLUMNS, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts copies of some rows of a matrix, zero where they are not inside, and past its columns."""
    COLUMNS = COLUMNS // 8 * 8  # which the compiler can see: it copies 16 bytes at a time
    column = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + row.to(gl.int64)[:, None] * COLUMNS + column[None, :]
    async_copy.async_copy_global_to_shared(buf, ptrs, mask=inside[:, None] & (column < COLUMNS)[None, :])


@gluon.jit
def _load(sides, bufs, ring, table, sizes, GATHER_LEFT: gl.constexpr, BLOCKS: gl.constexpr):
    BM: gl.constexpr = BLOCKS.bm
    BN: gl.constexpr = BLOCKS.bn
    BK: gl.constexpr = BLOCKS.bk
    STAGES: gl.constexpr = BLOCKS.stages
    gathered_ptr, source_ptr, sorted_ptr, sorted_desc = sides
    left_bufs, right_bufs = bufs
    full, empty, _ = ring
    P, Q = sizes
    BYTES: gl.constexpr = sorted_desc.dtype.primitive_bitwidth // 8
    GATHERED: gl.constexpr = BM if GATHER_LEFT else BN
    SORTED: gl.constexpr = BN if GATHER_LEFT else BM
    COPIED: gl.constexpr = copied_layout(GATHERED)
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        last = gl.maximum(end - 1, 0)
        row = start + gl.arange(0, BK, layout=gl.SliceLayout(1, COPIED))
        # The next step's rows are looked up a step ahead.
        source = gl.load(source_ptr + gl.minimum(row, last)).to(gl.int32)
        for row0 in range(start, end, BK):
            await_empty(empty, it, STAGES)
            if GATHER_LEFT:
                gathered_buf = left_bufs.index(it % STAGES)
                sorted_buf = right_bufs.index(it % STAGES)
                _copy_rows(gathered_buf, gathered_ptr, source, row < end, row_tile * BM, P, GATHERED, COPIED)
                sorted_columns = Q
                first = col_tile * BN
            else:
                gathered_buf = right_bufs.index(it % STAGES)
                sorted_buf = left_bufs.index(it % STAGES)
                _copy_rows(gathered_buf, gathered_ptr, source, row < end, col_tile * BN, Q, GATHERED, COPIED)
                sorted_columns = P
                first = row_tile * BM
            if row0 + BK <= end:
                announce(full, it, STAGES, BK * SORTED * BYTES)
                tma.async_copy_global_to_shared(sorted_desc, [row0, first], full.index(it % STAGES), sorted_buf)
            else:
                fill(full, it, STAGES, True)
                _copy_rows(sorted_buf, sorted_ptr, row, row < end, first, sorted_columns, SORTED, COPIED)
            row += BK
            source = gl.load(source_ptr + gl.minimum(row, last)).to(gl.int32)
            end_step(full, it, STAGES, BLOCKS.lag)
            it += 1
    end_steps(full, it, STAGES, BLOCKS.lag)


@gluon.jit
def _multiply(total_ptr, out_ptr, bufs, ring, table, sizes, GROUP_OF_WARPS: gl.constexpr, BLOCKS: gl.constexpr):
    P, Q = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, end - start, GROUP_OF_WARPS, True, False, BLOCKS)
        # All matrices below each other.
        first = expert * P + row_tile * BLOCKS.bm + GROUP_OF_WARPS * ROWS
        store_tile(acc, out_ptr, first, (expert + 1) * P, col_tile * BN, Q, total_ptr, ROWS, BN)


@jit(do_not_specialize=["experts", "n_row_tiles", "n_col_tiles"])
def dweight_kernel(
    # The side whose rows are looked up, left [·, P] (GATHER_LEFT) or right [·, Q], and which each row reads, [rows]
    # int64; the other side, and boxes [BK, BN or BM] of it; what is added, or None, and results, [E, P, Q], which may
    # be the same.
    gathered_ptr, source_ptr, sorted_ptr, sorted_desc, total_ptr, out_ptr,
    # [E + 1] int32: first row of each expert and, last, the number of rows, at least one. P, Q: multiples of 8.
    starts_ptr, P, Q, experts, n_row_tiles, n_col_tiles,
    GATHER_LEFT: gl.constexpr,
    # LAG is at most STAGES - 2.
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG)
    dtype: gl.constexpr = sorted_desc.dtype
    left_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BM], sorted_desc.layout)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], sorted_desc.layout)
    bufs = (left_bufs, right_bufs)
    ring = make_ring(2, BLOCKS)
    table = (starts_ptr, experts, n_row_tiles, n_col_tiles)
    sizes = (P, Q)
    sides = (gathered_ptr, source_ptr, sorted_ptr, sorted_desc)
    gl.warp_specialize(
        [
            (_multiply, (total_ptr, out_ptr, bufs, ring, table, sizes, 0, BLOCKS)),
            (_multiply, (total_ptr, out_ptr, bufs, ring, table, sizes, 1, BLOCKS)),
            (_load, (sides, bufs, ring, table, sizes, GATHER_LEFT, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
