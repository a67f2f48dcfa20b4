"""Grouped GEMM of the hidden gradient, dA' = dy[source]·W2_e; contract and epilogue as in `triton/grouped/dhidden.py`.

H is loaded through the ring in the steps after a tile's GEMM, while the tile is still being multiplied. Before threads
release a stage that they have read, they fence, because bulk copies write it through the async proxy, and synchronize,
because one thread signals for all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import act_both, halves, store_columns, store_layout
from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_full,
    blocks,
    load_gathered,
    locate,
    make_ring,
    multiply,
    release,
    threads_barrier,
    tiles_in,
)


@gluon.jit
def _box(h_bufs, ring, it, FIRST: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    full, _, _ = ring
    await_full(full, it, STAGES)
    return h_bufs.index(it % STAGES).slice(FIRST, ROWS, 0)


@gluon.jit
def _release_projections(ring, it, NUM_PROJECTIONS: gl.constexpr, STAGES: gl.constexpr):
    _, empty, _ = ring
    fence_async_shared()
    threads_barrier()
    for half in gl.static_range(NUM_PROJECTIONS):
        release(empty, it + half, STAGES, True)


@gluon.jit
def _finish_gated(da, s, g, u, dh_ptr, a_ptr, row, end, column, H, ACT: gl.constexpr):
    u = u.to(gl.float32)
    act, slope = act_both(g.to(gl.float32), ACT)
    a = act * u
    scaled = da * s[:, None]
    if dh_ptr is not None:
        store_columns(scaled * u * slope, dh_ptr, row, end, column, 2 * H, H)
        store_columns(scaled * act, dh_ptr + H, row, end, column, 2 * H, H)
    if a_ptr is not None:
        store_columns(a * s[:, None], a_ptr, row, end, column, H, H)
    return gl.sum(gl.where((column < H)[None, :], da * a, 0.0), axis=1)


@gluon.jit
def _finish_plain(da, s, h, dh_ptr, a_ptr, row, end, column, H, ACT: gl.constexpr):
    a, slope = act_both(h.to(gl.float32), ACT)
    if dh_ptr is not None:
        store_columns(da * s[:, None] * slope, dh_ptr, row, end, column, H, H)
    if a_ptr is not None:
        store_columns(a * s[:, None], a_ptr, row, end, column, H, H)
    return gl.sum(gl.where((column < H)[None, :], da * a, 0.0), axis=1)


@gluon.jit
def _finish(
    da, s, of_tile, it, row, end, first_column,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    OUT: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Run the epilogue on WIDTH columns, a bulk-copied box of BK at a time: all at once would not fit the registers."""
    _, dh_ptr, a_ptr, _, bufs, ring, _, sizes = of_tile
    _, H = sizes
    NUM_PROJECTIONS: gl.constexpr = 2 if GATED else 1
    BK: gl.constexpr = BLOCKS.bk
    STAGES: gl.constexpr = BLOCKS.stages
    if WIDTH == BK:
        PART: gl.constexpr = BK // 2
        h_bufs, _ = bufs
        column = first_column + gl.arange(0, PART, layout=gl.SliceLayout(0, OUT))
        parts = halves(da, ROWS, BK)
        ds = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, OUT))
        h = _box(h_bufs, ring, it, GROUP_OF_WARPS * ROWS, ROWS, STAGES)
        if GATED:
            u = _box(h_bufs, ring, it + 1, GROUP_OF_WARPS * ROWS, ROWS, STAGES)
        for half in gl.static_range(2):
            part = gl.convert_layout(parts[half], OUT)
            h_part = h.slice(half * PART, PART, 1).load(OUT)
            at = column + half * PART
            if GATED:
                u_part = u.slice(half * PART, PART, 1).load(OUT)
                ds += _finish_gated(part, s, h_part, u_part, dh_ptr, a_ptr, row, end, at, H, ACT)
            else:
                ds += _finish_plain(part, s, h_part, dh_ptr, a_ptr, row, end, at, H, ACT)
        _release_projections(ring, it, NUM_PROJECTIONS, STAGES)
        return ds
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = halves(da, ROWS, WIDTH)
        ds = _finish(left, s, of_tile, it, row, end, first_column, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, OUT, BLOCKS)
        it += NUM_PROJECTIONS * (HALF // BK)
        first_column += HALF
        return ds + _finish(
            right, s, of_tile, it, row, end, first_column, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, OUT, BLOCKS
        )


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    weights, _, _, ds_ptr, bufs, ring, table, sizes = of_tile
    weight_ptr, n_rows = weights
    D, _ = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    NUM_BOXES: gl.constexpr = (2 if GATED else 1) * (BN // BLOCKS.bk)
    OUT: gl.constexpr = store_layout(BLOCKS.bk // 2)
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, False, BLOCKS)
        row = start + GROUP_OF_WARPS * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        if WEIGHTED:
            s = gl.load(weight_ptr + row, mask=row < end, other=0.0).to(gl.float32)
        else:
            s = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, OUT))
        ds = _finish(acc, s, of_tile, it, row, end, col_tile * BN, GROUP_OF_WARPS, ACT, GATED, ROWS, BN, OUT, BLOCKS)
        it += NUM_BOXES
        if ds_ptr is not None:
            gl.store(ds_ptr + (row + col_tile.to(gl.int64) * n_rows), ds, mask=row < end)


@jit(do_not_specialize=["n_col_tiles", "n_rows"])
def dhidden_kernel(
    # Gradients of results [·, D]; their row indices, [rows] int64; boxes [BK, BN] of the concatenated matrices [E·D,
    # H]; router weights s, [rows] float32; boxes [BM, BK] of pre-activations [rows, (2·)H].
    dy_ptr, source_ptr, w_desc, weight_ptr, h_desc,
    # dH like H, A [rows, H], and partial sums of ⟨dA', A⟩, [n_col_tiles, n_rows] float32; each may be None.
    dh_ptr, a_ptr, ds_ptr,
    tiles_ptr, used_ptr, ends_ptr, D, H, n_rows, n_col_tiles,
    # Without WEIGHTED, s is 1. EVEN: BK divides D (it always divides BN).
    ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, EVEN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG)
    NUM_PROJECTIONS: gl.constexpr = 2 if GATED else 1
    NUM_BOXES: gl.constexpr = NUM_PROJECTIONS * (BN // BK)
    dy_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BK, BN], w_desc.layout)
    bufs = (dy_bufs, w_bufs)
    ring = make_ring(2, BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (D, H)
    rows = (dy_ptr, source_ptr)
    of_tile = ((weight_ptr, n_rows), dh_ptr, a_ptr, ds_ptr, bufs, ring, table, sizes)
    gl.warp_specialize(
        [
            (_multiply, (of_tile, 0, ACT, GATED, WEIGHTED, BLOCKS)),
            (_multiply, (of_tile, 1, ACT, GATED, WEIGHTED, BLOCKS)),
            (
                load_gathered,
                (rows, w_desc, h_desc, bufs, ring, table, sizes, NUM_PROJECTIONS, False, NUM_BOXES, EVEN, BLOCKS),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
