"""Grouped GEMM of the up projection with gathered rows; contract as in `triton/grouped/up.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import act_forward, add_bias, halves, store_box
from fusedmoe.kernels.gluon.grouped.pipeline import (
    blocks,
    gathered_arrivals,
    load_gathered,
    locate,
    make_ring,
    mma_layout,
    multiply,
    tiles_in,
)


@gluon.jit
def _finish(
    g, u, b1_ptr, outs, out_bufs, slot, expert, row, end, column, H,
    PART: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Compute H and A from the accumulators g and u for WIDTH columns of a tile, and store them.

    They are stored in boxes of WIDE columns, which the warp group numbers from PART on; `slot` is the index in
    `out_bufs` of its first box. Recursion halves WIDTH until it is at most WIDE.
    """
    NUM_PROJECTIONS: gl.constexpr = 2 if GATED else 1
    if WIDTH > WIDE:
        HALF: gl.constexpr = WIDTH // 2
        NEXT: gl.constexpr = PART + (NUM_PROJECTIONS + 1) * (HALF // WIDE)
        g_left, g_right = halves(g, ROWS, WIDTH)
        u_left, u_right = halves(u, ROWS, WIDTH)
        _finish(
            g_left, u_left, b1_ptr, outs, out_bufs, slot, expert, row, end, column, H,
            PART, ROWS, HALF, WIDE, SLOTS, ACT, GATED, BIAS,
        )  # fmt: skip
        _finish(
            g_right, u_right, b1_ptr, outs, out_bufs, slot, expert, row, end, column + HALF, H,
            NEXT, ROWS, HALF, WIDE, SLOTS, ACT, GATED, BIAS,
        )  # fmt: skip
    else:
        MMA: gl.constexpr = mma_layout(WIDE)
        g_out, u_out, a_out = outs
        columns = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, MMA))
        bias = expert * NUM_PROJECTIONS * H
        # Each step as late as possible, because registers are scarce.
        g = gl.convert_layout(g, MMA)
        if BIAS:
            g = add_bias(g, b1_ptr, bias, 0, columns, H)
        store_box(g, g_out, out_bufs, slot + PART % SLOTS, row, end, column, NUM_PROJECTIONS * H, H, ROWS, WIDE, SLOTS)
        if GATED:
            u = gl.convert_layout(u, MMA)
            if BIAS:
                u = add_bias(u, b1_ptr, bias + H, 0, columns, H)
            store_box(u, u_out, out_bufs, slot + (PART + 1) % SLOTS, row, end, column, 2 * H, H, ROWS, WIDE, SLOTS)
            a = act_forward(g, ACT) * u
        else:
            a = act_forward(g, ACT)
        store_box(
            a, a_out, out_bufs, slot + (PART + NUM_PROJECTIONS) % SLOTS, row, end, column, H, H, ROWS, WIDE, SLOTS
        )


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, WIDE: gl.constexpr,
    SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    b1_ptr, outs, out_bufs, bufs, ring, table, sizes = of_tile
    D, H = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    BH: gl.constexpr = BN // 2 if GATED else BN
    slot: gl.constexpr = GROUP_OF_WARPS * SLOTS
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, True, BLOCKS)
        row, column = start + GROUP_OF_WARPS * ROWS, col_tile * BH
        if GATED:
            g, u = halves(acc, ROWS, BN)
        else:
            g, u = acc, acc
        _finish(
            g, u, b1_ptr, outs, out_bufs, slot, expert, row, end, column, H,
            0, ROWS, BH, WIDE, SLOTS, ACT, GATED, BIAS,
        )  # fmt: skip
    tma.store_wait(0)  # before the boxes are deallocated


@jit(do_not_specialize=["n_col_tiles"])
def up_kernel(
    # Tokens [·, D]; their row indices, [rows] int64; boxes [BN or, gated, BN/2, BK] of the concatenated matrices
    # [E·(2·)H, D]; their bias; results h [rows, (2·)H] and a [rows, H], and boxes, a group's rows and a power of two of
    # columns, of h's halves and of a. Without a gate, h is its own left half.
    x_ptr, source_ptr, w_desc, b1_ptr, h_ptr, a_ptr, g_desc, u_desc, a_desc,
    tiles_ptr, used_ptr, ends_ptr, D, H, n_col_tiles,
    # EVEN: BK divides D. SLOTS: result boxes per group; divides the number of boxes of a tile.
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr, SLOTS: gl.constexpr,
    COPIES_ARRIVE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG, copies_arrive=COPIES_ARRIVE)
    NUM_PROJECTIONS: gl.constexpr = 2 if GATED else 1
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], w_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    bufs = (x_bufs, w_bufs)
    WIDE: gl.constexpr = a_desc.block_shape[1]
    gl.static_assert(BN // NUM_PROJECTIONS // WIDE * (NUM_PROJECTIONS + 1) % SLOTS == 0)
    out_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * SLOTS, BM // 2, WIDE], a_desc.layout)
    outs = ((h_ptr, g_desc), (h_ptr + H, u_desc), (a_ptr, a_desc))
    ring = make_ring(gathered_arrivals(COPIES_ARRIVE), BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (D, H)
    rows = (x_ptr, source_ptr)
    of_tile = (b1_ptr, outs, out_bufs, bufs, ring, table, sizes)
    gl.warp_specialize(
        [
            (_multiply, (of_tile, 0, ACT, GATED, BIAS, WIDE, SLOTS, BLOCKS)),
            (_multiply, (of_tile, 1, ACT, GATED, BIAS, WIDE, SLOTS, BLOCKS)),
            (load_gathered, (rows, w_desc, None, bufs, ring, table, sizes, NUM_PROJECTIONS, True, 0, EVEN, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
