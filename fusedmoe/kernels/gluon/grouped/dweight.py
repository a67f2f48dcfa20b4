"""out_e = Σ over the rows n of expert e of left[n]ᵀ·right[n]: a product of ragged depth, one side's rows looked up.

The other side comes by bulk copies, but for an expert's last rows where they do not fill a step: a box would run into
rows that are another expert's, or that nobody has written. There both sides come by copies of threads, zero past the
end. An expert without rows has no step, and gets zeros. Gradients of other rows may be added on the way out.

Which rows a step reads is looked up LAG steps ahead, by copies of threads into shared memory that end with those of
the rows: a load by each thread would have to come from memory, and be waited for, while one step is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import store_boxes, store_tile
from fusedmoe.kernels.gluon.grouped.gathered import begin_step, copied_layout, end_steps
from fusedmoe.kernels.gluon.grouped.pipeline import (
    announce,
    await_empty,
    blocks,
    bulk_load,
    copy_rows,
    fill,
    make_ring,
    multiply,
    place,
)


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
def _copy_rows(
    buf, ptr, row, end, first_column, COLUMNS,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr, ALL: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Starts copies of some rows of a matrix. Zero are those whose number in their step is not below `end`, unless ALL
    are, and columns past the matrix's, of which EVEN says that there are none."""
    COLUMNS = COLUMNS // 8 * 8  # which the compiler can see: it copies 16 bytes at a time
    column = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + row.to(gl.int64)[:, None] * COLUMNS + column[None, :]
    # Few instructions: what loads is hardly faster than what multiplies.
    if ALL and EVEN:
        copy_rows(buf, ptrs)
    elif ALL:
        copy_rows(buf, ptrs, mask=(column < COLUMNS)[None, :])
    else:
        inside = gl.arange(0, row.shape[0], layout=gl.SliceLayout(1, LAYOUT)) < end
        copy_rows(buf, ptrs, mask=inside[:, None] & (column < COLUMNS)[None, :])


@gluon.jit
def _look_up(sources, source_ptr, it, row0, last, BLOCKS: gl.constexpr):
    """Starts the copy of which rows step `it` reads, whose own are those from row0 on, up to the last."""
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
    COPIED: gl.constexpr = copied_layout(GATHERED)
    ROW: gl.constexpr = gl.SliceLayout(1, COPIED)
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        last = gl.maximum(end - 1, 0)
        first_step = it
        # Groups as of steps before the first: each is waited for as these are.
        for step in gl.static_range(LAG):
            _look_up(sources, source_ptr, it + step, start + step * BK, last, BLOCKS)
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
                announce(full, it, STAGES, BK * SORTED * BYTES)
                bulk_load(sorted_desc, [row0, sorted_first], full.index(it % STAGES), sorted_buf)
                source = sources.index(it % STAGES).load(ROW).to(gl.int32)
                _copy_rows(
                    gathered_buf, gathered_ptr, source, BK, gathered_first, gathered_columns,
                    GATHERED, COPIED, True, EVEN,
                )  # fmt: skip
            else:
                fill(full, it, STAGES, True)
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
            # Not past the end: such copies could still be under way when the next tile looks its rows up.
            if row0 + LAG * BK < end:
                _look_up(sources, source_ptr, it + LAG, row0 + LAG * BK, last, BLOCKS)
            async_copy.commit_group()
            it += 1
        end_steps(full, it, first_step, STAGES, LAG)


@gluon.jit
def _multiply(
    total_ptr, out, boxes, bufs, ring, table, sizes,
    GROUP_OF_WARPS: gl.constexpr, SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    P, Q = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    it = 0
    for tile in range(gl.program_id(0), _tiles_in(table), gl.num_programs(0)):
        expert, start, end, row_tile, col_tile = _locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, end - start, GROUP_OF_WARPS, True, False, BLOCKS)
        # All matrices below each other.
        first, end = expert * P + row_tile * BLOCKS.bm + GROUP_OF_WARPS * ROWS, (expert + 1) * P
        if total_ptr is None:
            store_boxes(
                acc, None, out, boxes, GROUP_OF_WARPS * SLOTS, expert, first, end, col_tile * BN, Q, (0, 0),
                0, ROWS, BN, out[1].block_shape[1], SLOTS, False,
            )  # fmt: skip
        else:
            store_tile(acc, out[0], first, end, col_tile * BN, Q, total_ptr, ROWS, BN)
    if total_ptr is None:
        tma.store_wait(0)  # before the boxes are gone


@jit(do_not_specialize=["experts", "n_row_tiles", "n_col_tiles"])
def dweight_kernel(
    # The side whose rows are looked up, left [·, P] (GATHER_LEFT) or right [·, Q], and which each row reads, [rows]
    # int64; the other side, and boxes [BK, BN or BM] of it; what is added, or None, and results, [E, P, Q], which may
    # be the same. Where nothing is added results go by boxes of a group's rows and some columns, a power of two, of
    # all matrices below each other, [E·P, Q].
    gathered_ptr, source_ptr, sorted_ptr, sorted_desc, total_ptr, out_ptr, out_desc,
    # [E + 1] int32: first row of each expert and, last, the number of rows, at least one. P, Q: multiples of 8.
    starts_ptr, P, Q, experts, n_row_tiles, n_col_tiles,
    GATHER_LEFT: gl.constexpr,
    # EVEN: tiles end where the columns of the side that is looked up do.
    EVEN: gl.constexpr,
    # SLOTS: boxes of results that each group has room for; it divides those of a tile.
    SLOTS: gl.constexpr,
    # LAG: at least 1, and at most STAGES - 2.
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
        boxes: gl.constexpr = None
    else:
        gl.static_assert(BN // out_desc.block_shape[1] % SLOTS == 0)
        boxes = gl.allocate_shared_memory(dtype, [2 * SLOTS, BM // 2, out_desc.block_shape[1]], out_desc.layout)
    out = (out_ptr, out_desc)
    ring = make_ring(2, BLOCKS)
    table = (starts_ptr, experts, n_row_tiles, n_col_tiles)
    sizes = (P, Q)
    sides = (gathered_ptr, source_ptr, sorted_ptr, sorted_desc)
    gl.warp_specialize(
        [
            (_multiply, (total_ptr, out, boxes, bufs, ring, table, sizes, 0, SLOTS, BLOCKS)),
            (_multiply, (total_ptr, out, boxes, bufs, ring, table, sizes, 1, SLOTS, BLOCKS)),
            (_load, (sides, sources, bufs, ring, table, sizes, GATHER_LEFT, EVEN, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
