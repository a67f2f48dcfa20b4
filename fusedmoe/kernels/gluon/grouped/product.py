"""Grouped GEMM of rows with their expert's matrix by bulk copies; contract as in `triton/grouped/product.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import store_boxes
from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_empty,
    blocks,
    bulk_load,
    expect_bytes,
    first_row,
    locate,
    make_ring,
    multiply,
    rows_of_group,
    tiles_in,
    tiles_of_group,
)


@gluon.jit
def _load(a_desc, b_desc, bufs, ring, table, sizes, TRANSPOSED: gl.constexpr, BLOCKS: gl.constexpr):
    a_bufs, b_bufs = bufs
    full, empty = ring[0], ring[1]
    K, N = sizes
    STAGES: gl.constexpr = BLOCKS.stages
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, _, col_tile = locate(tile, table, BLOCKS.group)
        n0 = col_tile * BLOCKS.bn
        for k0 in range(0, K, BLOCKS.bk):
            await_empty(empty, it, STAGES)
            expect_bytes(full, it, STAGES, (BLOCKS.bm + BLOCKS.bn) * BLOCKS.bk * (a_desc.dtype.primitive_bitwidth // 8))
            bar = full.index(it % STAGES)
            # A tile's box may extend into the next expert's rows, whose results are not stored.
            bulk_load(a_desc, [start, k0], bar, a_bufs.index(it % STAGES))
            if TRANSPOSED:
                bulk_load(b_desc, [expert * N + n0, k0], bar, b_bufs.index(it % STAGES))
            else:
                bulk_load(b_desc, [expert * K + k0, n0], bar, b_bufs.index(it % STAGES))
            it += 1


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr, WIDE: gl.constexpr,
    SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    bias_ptr, out, out_bufs, bufs, ring, table, sizes, bias_sizes = of_tile
    K, N = sizes
    ROWS: gl.constexpr = rows_of_group(BLOCKS.bm, BLOCKS.pingpong)
    FIRST: gl.constexpr = first_row(GROUP_OF_WARPS, BLOCKS.bm, BLOCKS.pingpong)
    first_tile, further, it, between = tiles_of_group(K, GROUP_OF_WARPS, BLOCKS)
    for tile in range(first_tile, tiles_in(table), further):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, K, GROUP_OF_WARPS, False, TRANSPOSED, BLOCKS)
        it += between
        store_boxes(
            acc, bias_ptr, out, out_bufs, GROUP_OF_WARPS * SLOTS, expert, start + FIRST, end, col_tile * BLOCKS.bn, N,
            bias_sizes, 0, ROWS, BLOCKS.bn, WIDE, SLOTS, BIAS,
        )  # fmt: skip
    tma.store_wait(0)  # before the boxes are deallocated


@jit(do_not_specialize=["n_col_tiles", "bias_start", "bias_columns"])
def product_kernel(
    # Descriptors: boxes [BM, BK] of the rows; of the concatenated matrices [BN, BK] of [E·N, K], or [BK, BN] of [E·K,
    # N]; of the results, a group's rows and a power of two of columns.
    a_desc, b_desc, bias_ptr, out_ptr, out_desc,
    tiles_ptr, used_ptr, ends_ptr, K, N, n_col_tiles, bias_start, bias_columns,
    TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    # BN is at least 32 on a GPU. SLOTS: result boxes per group; divides the number of boxes of a tile.
    SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, pingpong=PINGPONG)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    if TRANSPOSED:
        b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    else:
        b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BK, BN], b_desc.layout)
    bufs = (a_bufs, b_bufs)
    ROWS: gl.constexpr = rows_of_group(BM, PINGPONG)
    WIDE: gl.constexpr = out_desc.block_shape[1]
    gl.static_assert(BN // WIDE % SLOTS == 0)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2 * SLOTS, ROWS, WIDE], out_desc.layout)
    out = (out_ptr, out_desc)
    ring = make_ring(1, BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (K, N)
    bias_sizes = (bias_start, bias_columns)
    of_tile = (bias_ptr, out, out_bufs, bufs, ring, table, sizes, bias_sizes)
    gl.warp_specialize(
        [
            (_multiply, (of_tile, 0, TRANSPOSED, BIAS, WIDE, SLOTS, BLOCKS)),
            (_multiply, (of_tile, 1, TRANSPOSED, BIAS, WIDE, SLOTS, BLOCKS)),
            (_load, (a_desc, b_desc, bufs, ring, table, sizes, TRANSPOSED, BLOCKS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
