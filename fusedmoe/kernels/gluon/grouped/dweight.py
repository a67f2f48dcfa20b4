"""Weight gradient of the experts, one side gathered; contract as in `triton/grouped/dweight.py`.

Bulk copies load the other side, except an expert's last rows if they do not fill a step: the copy would extend into
rows of another expert or into uninitialized memory. There threads copy both sides, zero past the end.

Threads copy a step's row indices into shared memory LAG steps ahead. Loads into registers would stall the threads for
as long as the multiplication of a step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import store_boxes, store_tile
from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_empty,
    begin_step,
    blocks,
    bulk_load,
    copy_layout,
    copy_rows,
    end_steps,
    expect_bytes,
    make_ring,
    mark_filled,
    multiply,
    tile_position,
)


@gluon.jit
def _locate(tile, table, GROUP: gl.constexpr):
    starts_ptr, _, n_row_tiles, n_col_tiles = table
    of_expert = n_row_tiles * n_col_tiles
    expert = tile // of_expert
    row_tile, col_tile = tile_position(tile % of_expert, n_row_tiles, n_col_tiles, GROUP)
    return expert, gl.load(starts_ptr + expert), gl.load(starts_ptr + expert + 1), row_tile, col_tile


@gluon.jit
def _tiles_in(table):
    _, experts, n_row_tiles, n_col_tiles = table
    return experts * n_row_tiles * n_col_tiles


@gluon.jit
def _copy_rows(
    buf, ptr, row, end, first_column, COLUMNS,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr, ALL: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Start copies of some rows of a matrix, with zeros elsewhere.

    Unless ALL, rows from index `end` of the step on are zero; unless EVEN, so are columns past the matrix.
    """
    COLUMNS = COLUMNS // 8 * 8  # visible to the compiler: copies are 16 bytes
    column = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + row.to(gl.int64)[:, None] * COLUMNS + column[None, :]
    if ALL and EVEN:
        copy_rows(buf, ptrs)
    elif ALL:
        copy_rows(buf, ptrs, mask=(column < COLUMNS)[None, :])
    else:
        inside = gl.arange(0, row.shape[0], layout=gl.SliceLayout(1, LAYOUT)) < end
        copy_rows(buf, ptrs, mask=inside[:, None] & (column < COLUMNS)[None, :])


@gluon.jit
def _load_row_indices(sources, source_ptr, it, row0, last, BLOCKS: gl.constexpr):
    """Start the copy of the row indices of step `it`, whose rows start at row0, clamped to the last."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.minimum(row0 + gl.arange(0, BLOCKS.bk, layout=LAYOUT), last)
    copy_rows(sources.index(it % BLOCKS.stages), source_ptr + row)


@gluon.jit
def _load(
    sides, sources, bufs, ring, table, sizes, GATHER_LEFT: gl.constexpr, EVEN: gl.constexpr, BLOCKS: gl.constexpr
):
    BM: gl.constexpr = BLOCKS.bm
    BN: gl.constexpr = BLOCKS.bn
    BK: gl.constexpr = BLOCKS.bk
    STAGES: gl.constexpr = BLOCKS.stages
    LAG: gl.constexpr = BLOCKS.lag
    gathered_ptr, source_ptr, sorted_ptr, sorted_desc = sides
    left_bufs, right_bufs = bufs
    if GATHER_LEFT:
        gathered_bufs, sorted_bufs = left_bufs, right_bufs
    else:
        gathered_bufs, sorted_bufs = right_bufs, left_bufs
    full, empty, _ = ring
    P, Q = sizes
    BYTES: gl.constexpr = sorted_desc.dtype.primitive_bitwidth // 8
    GATHERED: gl.constexpr = BM if GATHER_LEFT else BN
    SORTED: gl.constexpr = BN if GATHER_LEFT else BM
    COPIED: gl.constexpr = copy_layout(GATHERED)
    ROW: gl.constexpr = gl.SliceLayout(1, COPIED)
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        last = gl.maximum(end - 1, 0)
        first_step = it
        # Commit groups also for steps before the first, so that waits count uniformly.
        for step in gl.static_range(LAG):
            _load_row_indices(sources, source_ptr, it + step, start + step * BK, last, BLOCKS)
            async_copy.commit_group()
        if GATHER_LEFT:
            gathered_first, gathered_columns, sorted_first, sorted_columns = row_tile * BM, P, col_tile * BN, Q
        else:
            gathered_first, gathered_columns, sorted_first, sorted_columns = col_tile * BN, Q, row_tile * BM, P
        for row0 in range(start, end, BK):
            gathered_buf = gathered_bufs.index(it % STAGES)
            sorted_buf = sorted_bufs.index(it % STAGES)
            await_empty(empty, it, STAGES)
            begin_step(full, it, first_step, STAGES, LAG)
            if row0 + BK <= end:
                expect_bytes(full, it, STAGES, BK * SORTED * BYTES)
                bulk_load(sorted_desc, [row0, sorted_first], full.index(it % STAGES), sorted_buf)
                source = sources.index(it % STAGES).load(ROW).to(gl.int32)
                _copy_rows(
                    gathered_buf, gathered_ptr, source, BK, gathered_first, gathered_columns,
                    GATHERED, COPIED, True, EVEN,
                )  # fmt: skip
            else:
                mark_filled(full, it, STAGES, True)
                source = sources.index(it % STAGES).load(ROW).to(gl.int32)
                _copy_rows(
                    gathered_buf, gathered_ptr, source, end - row0, gathered_first, gathered_columns,
                    GATHERED, COPIED, False, False,
                )  # fmt: skip
                row = row0 + gl.arange(0, BK, layout=ROW)
                _copy_rows(
                    sorted_buf, sorted_ptr, row, end - row0, sorted_first, sorted_columns,
                    SORTED, COPIED, False, False,
                )  # fmt: skip
            # Copies past the end could be in flight when the next tile loads its indices.
            if row0 + LAG * BK < end:
                _load_row_indices(sources, source_ptr, it + LAG, row0 + LAG * BK, last, BLOCKS)
            async_copy.commit_group()
            it += 1
        end_steps(full, it, first_step, STAGES, LAG)


@gluon.jit
def _multiply(
    total_ptr, out, out_bufs, bufs, ring, table, sizes,
    GROUP_OF_WARPS: gl.constexpr, SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    P, Q = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, end - start, GROUP_OF_WARPS, True, False, BLOCKS)
        # The matrices are concatenated.
        first, end = expert * P + row_tile * BLOCKS.bm + GROUP_OF_WARPS * ROWS, (expert + 1) * P
        if total_ptr is None:
            store_boxes(
                acc, None, out, out_bufs, GROUP_OF_WARPS * SLOTS, expert, first, end, col_tile * BN, Q, (0, 0),
                0, ROWS, BN, out[1].block_shape[1], SLOTS, False,
            )  # fmt: skip
        else:
            store_tile(acc, out[0], first, end, col_tile * BN, Q, total_ptr, ROWS, BN)
    if total_ptr is None:
        tma.store_wait(0)  # before the boxes are deallocated


@jit(do_not_specialize=["experts", "n_row_tiles", "n_col_tiles"])
def dweight_kernel(
    # The gathered side, left [·, P] (GATHER_LEFT) or right [·, Q], and its row indices, [rows] int64; the other side,
    # and boxes [BK, BN or BM] of it; the accumulator or None, and results, [E, P, Q], which may be the same. Without
    # accumulator, results are stored by boxes of a group's rows and a power of two of columns, of the concatenated
    # matrices [E·P, Q].
    gathered_ptr, source_ptr, sorted_ptr, sorted_desc, total_ptr, out_ptr, out_desc,
    # [E + 1] int32: first row of each expert, then the number of rows, at least one. P, Q: multiples of 8.
    starts_ptr, P, Q, experts, n_row_tiles, n_col_tiles,
    GATHER_LEFT: gl.constexpr,
    # EVEN: tiles end where the columns of the gathered side do.
    EVEN: gl.constexpr,
    # SLOTS: result boxes per group; divides the number of boxes of a tile.
    SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG)
    dtype: gl.constexpr = sorted_desc.dtype
    left_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BM], sorted_desc.layout)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], sorted_desc.layout)
    bufs = (left_bufs, right_bufs)
    sources = gl.allocate_shared_memory(gl.int64, [STAGES, BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if total_ptr is not None:
        out_bufs: gl.constexpr = None
    else:
        gl.static_assert(BN // out_desc.block_shape[1] % SLOTS == 0)
        out_bufs = gl.allocate_shared_memory(dtype, [2 * SLOTS, BM // 2, out_desc.block_shape[1]], out_desc.layout)
    out = (out_ptr, out_desc)
    ring = make_ring(2, BLOCKS)
    table = (starts_ptr, experts, n_row_tiles, n_col_tiles)
    sizes = (P, Q)
    sides = (gathered_ptr, source_ptr, sorted_ptr, sorted_desc)
    gl.warp_specialize(
        [
            (_multiply, (total_ptr, out, out_bufs, bufs, ring, table, sizes, 0, SLOTS, BLOCKS)),
            (_multiply, (total_ptr, out, out_bufs, bufs, ring, table, sizes, 1, SLOTS, BLOCKS)),
            (_load, (sides, sources, bufs, ring, table, sizes, GATHER_LEFT, EVEN, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
