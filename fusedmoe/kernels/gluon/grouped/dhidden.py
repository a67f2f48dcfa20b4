"""dA' = dy[source]·W2_e and from it, on the way out, dH = s·dA'·act'(H), s·A and the router weights' gradient ⟨dA', A⟩.
What nobody wants has no pointer, and is not stored.

H comes through the ring as dy and W2 do, in steps of its own behind those of a tile's product: it is on its way while
the tile is still multiplied. Threads read it out of its stages. Before they give one back they fence, as bulk copies
come into it through another path, and wait for each other, as one of them speaks for all. All is computed where the
product's results are: each thread reads of H what belongs to its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import act_both, halves, multiplied_layout, store_box
from fusedmoe.kernels.gluon.grouped.gathered import box_of_group, load_gathered
from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_full,
    blocks,
    locate,
    make_ring,
    multiply,
    release,
    threads_barrier,
    tiles_in,
)


@gluon.jit
def _give_back(ring, it, STAGES: gl.constexpr):
    """The stage that threads have read."""
    _, empty, _ = ring
    fence_async_shared()
    threads_barrier()
    release(empty, it, STAGES, True)


@gluon.jit
def _read(bufs, ring, it, GROUP_OF_WARPS: gl.constexpr, GATED: gl.constexpr, MMA: gl.constexpr, BLOCKS: gl.constexpr):
    """This group's rows of some columns of both halves of H; of the only half, twice."""
    full, _, _ = ring
    await_full(full, it, BLOCKS.stages)
    h = box_of_group(bufs, it % BLOCKS.stages, 0, GROUP_OF_WARPS, BLOCKS).load(MMA)
    if GATED:
        u = box_of_group(bufs, it % BLOCKS.stages, 1, GROUP_OF_WARPS, BLOCKS).load(MMA)
    else:
        u = h
    _give_back(ring, it, BLOCKS.stages)
    return h, u


@gluon.jit
def _finish(
    da, s, of_tile, it, row, end, column,
    PART: gl.constexpr, GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Stores dH and s·A for WIDTH columns of a tile, which are its PARTth box of columns and the next ones, and returns
    their part of ⟨dA', A⟩."""
    _, outs, _, bufs, boxes, ring, _, sizes = of_tile
    _, H = sizes
    BK: gl.constexpr = BLOCKS.bk
    if WIDTH > BK:
        HALF: gl.constexpr = WIDTH // 2
        NEXT: gl.constexpr = PART + HALF // BK
        left, right = halves(da, ROWS, WIDTH)
        ds = _finish(
            left, s, of_tile, it, row, end, column, PART, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, SLOTS, BLOCKS
        )
        it += HALF // BK
        column += HALF
        return ds + _finish(
            right, s, of_tile, it, row, end, column, NEXT, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, SLOTS, BLOCKS
        )
    else:
        dh_ptr, dh_desc, du_desc, a_ptr, a_desc = outs
        HALVES: gl.constexpr = 2 if GATED else 1
        DH: gl.constexpr = 0 if dh_ptr is None else HALVES
        FIRST: gl.constexpr = PART * (DH if a_ptr is None else DH + 1)
        SLOT: gl.constexpr = GROUP_OF_WARPS * SLOTS
        MMA: gl.constexpr = multiplied_layout(BK)
        # The same registers, by the name under which they are known to be those that H is read to.
        da = gl.convert_layout(da, MMA, assert_trivial=True)
        dtype: gl.constexpr = boxes.dtype
        h, u = _read(bufs, ring, it, GROUP_OF_WARPS, GATED, MMA, BLOCKS)
        act, slope = act_both(h.to(gl.float32), ACT)
        # All is narrowed before any of it is stored: in float32 it would not fit the registers.
        scaled = da * s[:, None]
        if GATED:
            u = u.to(gl.float32)
            dh = (scaled * u * slope).to(dtype)
            du = (scaled * act).to(dtype)
            a = act * u
        else:
            dh = (scaled * slope).to(dtype)
            a = act
        # Past the matrix's columns dA' is 0.
        ds = gl.sum(da * a, axis=1)
        sa = (a * s[:, None]).to(dtype)
        if dh_ptr is not None:
            out = (dh_ptr, dh_desc)
            store_box(dh, out, boxes, SLOT + FIRST % SLOTS, row, end, column, HALVES * H, H, ROWS, BK, SLOTS)
            if GATED:
                out = (dh_ptr + H, du_desc)
                store_box(du, out, boxes, SLOT + (FIRST + 1) % SLOTS, row, end, column, HALVES * H, H, ROWS, BK, SLOTS)
        if a_ptr is not None:
            out = (a_ptr, a_desc)
            store_box(sa, out, boxes, SLOT + (FIRST + DH) % SLOTS, row, end, column, H, H, ROWS, BK, SLOTS)
        return ds


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, SLOTS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    weights, _, ds_ptr, bufs, _, ring, table, sizes = of_tile
    weight_ptr, n_rows = weights
    D, _ = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    LAYOUT: gl.constexpr = gl.SliceLayout(1, multiplied_layout(BLOCKS.bk))
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        _, start, end, col_tile = locate(tile, table, BLOCKS.group)
        first = start + GROUP_OF_WARPS * ROWS
        row = first + gl.arange(0, ROWS, layout=LAYOUT)
        if WEIGHTED:
            # On its way while the tile is multiplied: nothing waits for `end` yet.
            s = gl.load(weight_ptr + row, mask=row < n_rows, other=0.0).to(gl.float32)
        else:
            s = gl.full([ROWS], 1.0, gl.float32, layout=LAYOUT)
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, False, BLOCKS)
        ds = _finish(
            acc, s, of_tile, it, first, end, col_tile * BN, 0, GROUP_OF_WARPS, ACT, GATED, ROWS, BN, SLOTS, BLOCKS
        )
        it += BN // BLOCKS.bk
        if ds_ptr is not None:
            gl.store(ds_ptr + (row + col_tile.to(gl.int64) * n_rows), ds, mask=row < end)
    tma.store_wait(0)  # before the boxes are gone


@jit(do_not_specialize=["n_col_tiles", "n_rows"])
def dhidden_kernel(
    # Gradients of results [·, D]; which of them each row reads, [rows] int64; boxes [BK, BN] of all experts' matrices
    # below each other, [E·D, H]; router weights s, [rows] float32; boxes [BM/2, BK] of pre-activations [rows, (2·)H].
    dy_ptr, source_ptr, w_desc, weight_ptr, h_desc,
    # dH as H, A [rows, H] and the column tiles' parts of ⟨dA', A⟩, [n_col_tiles, n_rows] float32; each may be None.
    dh_ptr, a_ptr, ds_ptr,
    # Boxes [BM/2, BK] of dH's first half, of its second one if there is one, and of A.
    dh_desc, du_desc, a_desc,
    tiles_ptr, used_ptr, ends_ptr, D, H, n_rows, n_col_tiles,
    # Without WEIGHTED, s is 1. EVEN: BK divides D (it always divides BN). SLOTS: boxes of results that each group
    # has room for; it divides those of a tile.
    ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, EVEN: gl.constexpr, SLOTS: gl.constexpr,
    # LAG is at most STAGES - 2.
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG)
    HALVES: gl.constexpr = 2 if GATED else 1
    RESULTS: gl.constexpr = (0 if dh_ptr is None else HALVES) + (0 if a_ptr is None else 1)
    gl.static_assert(BN // BK * RESULTS % SLOTS == 0)
    # A stage holds boxes of H where it holds a step of the product otherwise.
    gl.static_assert(BM // 2 <= BK)
    gl.static_assert(HALVES * BK <= BN)
    dy_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BK, BN], w_desc.layout)
    boxes = gl.allocate_shared_memory(w_desc.dtype, [2 * SLOTS, BM // 2, BK], h_desc.layout)
    bufs = (dy_bufs, w_bufs)
    ring = make_ring(2, BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (D, H)
    rows = (dy_ptr, source_ptr)
    outs = (dh_ptr, dh_desc, du_desc, a_ptr, a_desc)
    of_tile = ((weight_ptr, n_rows), outs, ds_ptr, bufs, boxes, ring, table, sizes)
    gl.warp_specialize(
        [
            (_multiply, (of_tile, 0, ACT, GATED, WEIGHTED, SLOTS, BLOCKS)),
            (_multiply, (of_tile, 1, ACT, GATED, WEIGHTED, SLOTS, BLOCKS)),
            (load_gathered, (rows, w_desc, h_desc, bufs, ring, table, sizes, HALVES, False, True, EVEN, BLOCKS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
