"""h = x[source]·W1_eᵀ + b1_e and a = act(h): rows are gathered, and the activation is computed on the way out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import act_forward, add_bias, halves, store_columns, stored_layout
from fusedmoe.kernels.gluon.grouped.gathered import load_gathered
from fusedmoe.kernels.gluon.grouped.pipeline import (
    blocks,
    first_row,
    locate,
    make_ring,
    multiply,
    rows_of_group,
    tiles_in,
    tiles_of_group,
)


@gluon.jit
def _finish_gated(
    g, u, b1_ptr, h_ptr, a_ptr, expert, row, end, column, H, OUT: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr
):
    """Adds the bias to some columns of a tile and stores both halves of H, and A."""
    g = gl.convert_layout(g, OUT)
    u = gl.convert_layout(u, OUT)
    if BIAS:
        g = add_bias(g, b1_ptr, expert * 2 * H, 0, column, H)
        u = add_bias(u, b1_ptr, expert * 2 * H + H, 0, column, H)
    store_columns(g, h_ptr, row, end, column, 2 * H, H)
    store_columns(u, h_ptr + H, row, end, column, 2 * H, H)
    store_columns(act_forward(g, ACT) * u, a_ptr, row, end, column, H, H)


@gluon.jit
def _finish_plain(
    h, b1_ptr, h_ptr, a_ptr, expert, row, end, column, H, OUT: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr
):
    """Finishes a tile whose activation is not gated."""
    h = gl.convert_layout(h, OUT)
    if BIAS:
        h = add_bias(h, b1_ptr, expert * H, 0, column, H)
    store_columns(h, h_ptr, row, end, column, H, H)
    store_columns(act_forward(h, ACT), a_ptr, row, end, column, H, H)


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    b1_ptr, h_ptr, a_ptr, bufs, ring, table, sizes = of_tile
    D, H = sizes
    ROWS: gl.constexpr = rows_of_group(BLOCKS.bm, BLOCKS.pingpong)
    FIRST: gl.constexpr = first_row(GROUP_OF_WARPS, BLOCKS.bm, BLOCKS.pingpong)
    BN: gl.constexpr = BLOCKS.bn
    BH: gl.constexpr = BN // 2 if GATED else BN
    WIDE: gl.constexpr = BH // 4
    OUT: gl.constexpr = stored_layout(WIDE)
    first_tile, further, it, between = tiles_of_group(D, GROUP_OF_WARPS, BLOCKS)
    for tile in range(first_tile, tiles_in(table), further):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, True, BLOCKS)
        it += between
        row = start + FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        column = col_tile * BH + gl.arange(0, WIDE, layout=gl.SliceLayout(0, OUT))
        # Some columns at a time: all at once would not fit the registers.
        left, right = halves(acc, ROWS, BN)
        for half in gl.static_range(2):
            if GATED:
                g_left, g_right = halves(left, ROWS, BH)
                u_left, u_right = halves(right, ROWS, BH)
                g_first, g_second = halves(g_left if half == 0 else g_right, ROWS, BH // 2)
                u_first, u_second = halves(u_left if half == 0 else u_right, ROWS, BH // 2)
                at = column + 2 * half * WIDE
                _finish_gated(g_first, u_first, b1_ptr, h_ptr, a_ptr, expert, row, end, at, H, OUT, ACT, BIAS)
                _finish_gated(g_second, u_second, b1_ptr, h_ptr, a_ptr, expert, row, end, at + WIDE, H, OUT, ACT, BIAS)
            else:
                h_first, h_second = halves(left if half == 0 else right, ROWS, BN // 2)
                at = column + 2 * half * WIDE
                _finish_plain(h_first, b1_ptr, h_ptr, a_ptr, expert, row, end, at, H, OUT, ACT, BIAS)
                _finish_plain(h_second, b1_ptr, h_ptr, a_ptr, expert, row, end, at + WIDE, H, OUT, ACT, BIAS)


@jit(do_not_specialize=["n_col_tiles"])
def up_kernel(
    # Tokens [·, D]; which of them each row copies, [rows] int64; boxes [BN or, gated, BN/2, BK] of all experts'
    # matrices below each other, [E·(2·)H, D]; their bias; results h [rows, (2·)H] and a [rows, H].
    x_ptr, source_ptr, w_desc, b1_ptr, h_ptr, a_ptr,
    tiles_ptr, used_ptr, ends_ptr, D, H, n_col_tiles,
    # EVEN: BK divides D.
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr,
    # LAG is at most STAGES - 2.
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    PINGPONG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG, PINGPONG)
    HALVES: gl.constexpr = 2 if GATED else 1
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], w_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    bufs = (x_bufs, w_bufs)
    ring = make_ring(2, BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (D, H)
    rows = (x_ptr, source_ptr)
    of_tile = (b1_ptr, h_ptr, a_ptr, bufs, ring, table, sizes)
    gl.warp_specialize(
        [
            (_multiply, (of_tile, 0, ACT, GATED, BIAS, BLOCKS)),
            (_multiply, (of_tile, 1, ACT, GATED, BIAS, BLOCKS)),
            (load_gathered, (rows, w_desc, None, bufs, ring, table, sizes, HALVES, True, 0, EVEN, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
