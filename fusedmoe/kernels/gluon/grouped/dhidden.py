"""dA' = dy[source]·W2_e and from it, on the way out, dH = s·dA'·act'(H), s·A and the router weights' gradient ⟨dA', A⟩.
What nobody wants has no pointer, and is not stored.

H comes through the ring as dy and W2 do, in steps of its own behind those of a tile's product: it is on its way while
the tile is still multiplied. Threads read it out of its stages. Before they give one back they fence, as bulk copies
come into it through another path, and wait for each other, as one of them speaks for all.

Where groups take tiles by turns (PINGPONG), the end of a tile runs beside the other group's products. H would hold
stages that those need. So each thread copies what it will read itself to boxes of its group, the first parts beside its
own tile's products; all is read, computed and stored in parts that fit the registers (`TileParts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from fusedmoe.kernels.gluon import jit
from fusedmoe.kernels.gluon.grouped.columns import act_both, halves, store_columns, stored_layout
from fusedmoe.kernels.gluon.grouped.gathered import load_gathered, load_gathered_ahead
from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_full,
    blocks,
    locate,
    make_ring,
    multiply,
    release,
    threads_barrier,
    tiles_in,
    tiles_of_group,
)


@gluon.jit
def _box(h_bufs, ring, it, FIRST: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """This group's rows of a box of H."""
    full, _, _ = ring
    await_full(full, it, STAGES)
    return h_bufs.index(it % STAGES).slice(FIRST, ROWS, 0)


@gluon.jit
def _give_back(ring, it, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """The stages of both halves, from step `it` on."""
    _, empty, _ = ring
    fence_async_shared()
    threads_barrier()
    for half in gl.static_range(HALVES):
        release(empty, it + half, STAGES, True)


@gluon.jit
def _finish_gated(da, s, g, u, dh_ptr, a_ptr, row, end, column, H, COLUMNS, ACT: gl.constexpr):
    """Stores both halves of dH, and s·A, for some columns of a tile and returns the summands of ⟨dA', A⟩."""
    u = u.to(gl.float32)
    act, slope = act_both(g.to(gl.float32), ACT)
    a = act * u
    scaled = da * s[:, None]
    if dh_ptr is not None:
        store_columns(scaled * u * slope, dh_ptr, row, end, column, 2 * H, COLUMNS)
        store_columns(scaled * act, dh_ptr + H, row, end, column, 2 * H, COLUMNS)
    if a_ptr is not None:
        store_columns(a * s[:, None], a_ptr, row, end, column, H, COLUMNS)
    return gl.where((column < COLUMNS)[None, :], da * a, 0.0)


@gluon.jit
def _finish_plain(da, s, h, dh_ptr, a_ptr, row, end, column, H, COLUMNS, ACT: gl.constexpr):
    """Finishes a tile whose activation is not gated."""
    a, slope = act_both(h.to(gl.float32), ACT)
    if dh_ptr is not None:
        store_columns(da * s[:, None] * slope, dh_ptr, row, end, column, H, COLUMNS)
    if a_ptr is not None:
        store_columns(a * s[:, None], a_ptr, row, end, column, H, COLUMNS)
    return gl.where((column < COLUMNS)[None, :], da * a, 0.0)


@gluon.jit
def _finish(
    da, s, of_tile, it, row, end, first_column,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    OUT: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Finishes WIDTH columns, as many at a time as a box of H has: all at once would not fit the registers."""
    _, _, dh_ptr, a_ptr, _, bufs, ring, _, sizes = of_tile
    _, H = sizes
    HALVES: gl.constexpr = 2 if GATED else 1
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
                terms = _finish_gated(part, s, h_part, u_part, dh_ptr, a_ptr, row, end, at, H, H, ACT)
            else:
                terms = _finish_plain(part, s, h_part, dh_ptr, a_ptr, row, end, at, H, H, ACT)
            ds += gl.sum(terms, axis=1)
        _give_back(ring, it, HALVES, STAGES)
        return ds
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = halves(da, ROWS, WIDTH)
        ds = _finish(left, s, of_tile, it, row, end, first_column, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, OUT, BLOCKS)
        it += HALVES * (HALF // BK)
        first_column += HALF
        return ds + _finish(
            right, s, of_tile, it, row, end, first_column, GROUP_OF_WARPS, ACT, GATED, ROWS, HALF, OUT, BLOCKS
        )


@dataclass(frozen=True)
class TileParts:
    """A tile by turns is finished in parts of [rows, columns], row by row; `across`: how many there are in a row of
    them, `number`: in all; `ahead`: how many are fetched ahead.

    A warp has the same rows of a part as of a product, 16 in turn of each 64: every second 8 of them are a part's.
    """

    rows: int
    columns: int
    across: int
    number: int
    ahead: int


@gluon.constexpr_function
def _parts(BLOCKS, ahead):
    # More at once would not fit the registers.
    rows, columns = min(BLOCKS.bm, 64) // 2, min(BLOCKS.bn // 4, 32)
    across = BLOCKS.bn // columns
    return TileParts(rows, columns, across, BLOCKS.bm // rows * across, ahead)


@gluon.constexpr_function
def _first_row_of_part(number, PARTS):
    of_rows = number // PARTS.across
    return of_rows // 2 * 2 * PARTS.rows + of_rows % 2 * 8


@gluon.jit
def _rows_of_part(ROWS: gl.constexpr, OUT: gl.constexpr):
    """A part's rows, from its first one on: 8 and not the next 8."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    return row + row // 8 * 8


@gluon.jit
def _every_second_8(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, COLUMNS] -> the rows of two parts, without leaving registers."""
    first, second = x.reshape([ROWS // 16, 2, 8, COLUMNS]).permute([0, 2, 3, 1]).split()
    return first.reshape([ROWS // 2, COLUMNS]), second.reshape([ROWS // 2, COLUMNS])


@gluon.constexpr_function
def _kept_layout():
    """Returns the layout of boxes that threads copy to for themselves: rows of 16 bytes a thread, one by the other."""
    return gl.SwizzledSharedLayout(8, 1, 1, [1, 0])


@gluon.jit
def _fetch(h, left, H, NUMBER: gl.constexpr, GROUP_OF_WARPS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr):
    """Starts copies of a part of both halves of H, or of the only one, to this group's boxes, where parts take turns.
    A thread copies what it will read itself. Behind the last part there is nothing to copy. `h` is the tile's, `left`
    how many rows and columns there are from its first on."""
    h_ptr, h_bufs = h
    HALVES: gl.constexpr = 2 if GATED else 1
    OUT: gl.constexpr = stored_layout(PARTS.columns)
    # A multiple of 8 that the compiler can see is one: it copies 16 bytes at a time.
    H = H // 8 * 8
    if PARTS.number > NUMBER:
        # Each part has a pointer of its own: places in it are those in the others, and take few registers.
        down: gl.constexpr = _first_row_of_part(NUMBER, PARTS)
        right: gl.constexpr = NUMBER % PARTS.across * PARTS.columns
        row = _rows_of_part(PARTS.rows, OUT)
        column = gl.arange(0, PARTS.columns, layout=gl.SliceLayout(0, OUT))
        mask = (row < left[0] - down)[:, None] & (column < left[1] // 8 * 8 - right)[None, :]
        ptrs = h_ptr + (down * (HALVES * H) + right) + (row[:, None] * (HALVES * H) + column[None, :])
        for half in gl.static_range(HALVES):
            box = h_bufs.index(((PARTS.ahead + 1) * GROUP_OF_WARPS + NUMBER % (PARTS.ahead + 1)) * HALVES + half)
            async_copy.async_copy_global_to_shared(box, ptrs + half * H, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _narrowed(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums of a thread's neighbouring columns, which take few registers; they are summed over threads once a tile."""
    return gl.sum(x.reshape([ROWS, COLUMNS // 8, 8]), axis=2)


@gluon.jit
def _moved(ptr, places):
    """A pointer so many elements on, or none."""
    if ptr is None:
        return None
    else:
        return ptr + places


@gluon.jit
def _finish_by_turns(
    sums, da, s, h, outs, left, H,
    NUMBER: gl.constexpr, WIDTH: gl.constexpr,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Finishes WIDTH columns of some rows of a tile, from part NUMBER on, and adds to `sums` of ⟨dA', A⟩. As many parts
    as are fetched ahead have been, this one first; `h`, `outs` and `left` are as `_fetch` has them."""
    if PARTS.columns < WIDTH:
        HALF: gl.constexpr = WIDTH // 2
        NEXT: gl.constexpr = NUMBER + HALF // PARTS.columns
        near, far = halves(da, PARTS.rows, WIDTH)
        sums = _finish_by_turns(sums, near, s, h, outs, left, H, NUMBER, HALF, GROUP_OF_WARPS, ACT, GATED, PARTS)
        return _finish_by_turns(sums, far, s, h, outs, left, H, NEXT, HALF, GROUP_OF_WARPS, ACT, GATED, PARTS)
    else:
        _, h_bufs = h
        dh_ptr, a_ptr = outs
        BOX: gl.constexpr = ((PARTS.ahead + 1) * GROUP_OF_WARPS + NUMBER % (PARTS.ahead + 1)) * (2 if GATED else 1)
        OUT: gl.constexpr = stored_layout(PARTS.columns)
        down: gl.constexpr = _first_row_of_part(NUMBER, PARTS)
        right: gl.constexpr = NUMBER % PARTS.across * PARTS.columns
        row = _rows_of_part(PARTS.rows, OUT)
        column = gl.arange(0, PARTS.columns, layout=gl.SliceLayout(0, OUT))
        dh_ptr, a_ptr = _moved(dh_ptr, down * (2 * H if GATED else H) + right), _moved(a_ptr, down * H + right)
        rows, columns = left[0] - down, left[1] - right
        _fetch(h, left, H, NUMBER + PARTS.ahead, GROUP_OF_WARPS, GATED, PARTS)
        da = gl.convert_layout(da, OUT)
        async_copy.wait_group(PARTS.ahead)
        g = h_bufs.index(BOX).load(OUT)
        if GATED:
            u = h_bufs.index(BOX + 1).load(OUT)
            more = _finish_gated(da, s, g, u, dh_ptr, a_ptr, row, rows, column, H, columns, ACT)
        else:
            more = _finish_plain(da, s, g, dh_ptr, a_ptr, row, rows, column, H, columns, ACT)
        return sums + _narrowed(more, PARTS.rows, PARTS.columns)


@gluon.jit
def _weights(weight_ptr, row, end, WEIGHTED: gl.constexpr, OUT: gl.constexpr):
    """Router weights of rows, or ones."""
    if WEIGHTED:
        return gl.load(weight_ptr + row, mask=row < end, other=0.0).to(gl.float32)
    else:
        return gl.full([row.shape[0]], 1.0, gl.float32, layout=gl.SliceLayout(1, OUT))


@gluon.jit
def _multiply(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    weights, _, _, _, ds_ptr, bufs, ring, table, sizes = of_tile
    weight_ptr, n_rows = weights
    D, _ = sizes
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BN: gl.constexpr = BLOCKS.bn
    BOXES: gl.constexpr = (2 if GATED else 1) * (BN // BLOCKS.bk)
    OUT: gl.constexpr = stored_layout(BLOCKS.bk // 2)
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, False, BLOCKS)
        row = start.to(gl.int64) + GROUP_OF_WARPS * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        s = _weights(weight_ptr, row, end, WEIGHTED, OUT)
        ds = _finish(acc, s, of_tile, it, row, end, col_tile * BN, GROUP_OF_WARPS, ACT, GATED, ROWS, BN, OUT, BLOCKS)
        it += BOXES
        if ds_ptr is not None:
            gl.store(ds_ptr + (row + col_tile.to(gl.int64) * n_rows), ds, mask=row < end)


@gluon.jit
def _multiply_by_turns(
    of_tile,
    GROUP_OF_WARPS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    PARTS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    weights, all_h, dh_ptr, a_ptr, ds_ptr, bufs, ring, table, sizes = of_tile
    weight_ptr, n_rows = weights
    h_ptr, h_bufs = all_h
    D, H = sizes
    BN: gl.constexpr = BLOCKS.bn
    ROWS: gl.constexpr = PARTS.rows
    AHEAD: gl.constexpr = PARTS.ahead
    COLUMNS: gl.constexpr = PARTS.columns
    OUT: gl.constexpr = stored_layout(PARTS.columns)
    first_tile, further, it, between = tiles_of_group(D, GROUP_OF_WARPS, BLOCKS)
    for tile in range(first_tile, tiles_in(table), further):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        # Counted from its first row and column on, a tile's places have 32 bits.
        first = start.to(gl.int64) * H + col_tile * BN
        first_of_both = first + start.to(gl.int64) * H if GATED else first
        left = (end - start, H - col_tile * BN)
        h = (h_ptr + first_of_both, h_bufs)
        outs = (_moved(dh_ptr, first_of_both), _moved(a_ptr, first))
        for part in gl.static_range(AHEAD):
            _fetch(h, left, H, part, GROUP_OF_WARPS, GATED, PARTS)
        # Tensor cores read nothing of it; but what looks for fences in the machine code cannot tell.
        fence_async_shared()
        acc, it = multiply(bufs, ring, it, D, GROUP_OF_WARPS, False, False, BLOCKS)
        it += between
        if BLOCKS.bm > 64:
            above, below = acc.reshape([2, 64, BN]).permute([1, 2, 0]).split()
            of_rows = _every_second_8(above, 64, BN) + _every_second_8(below, 64, BN)
        else:
            of_rows = _every_second_8(acc, BLOCKS.bm, BN)
        for number in gl.static_range(BLOCKS.bm // ROWS):
            row = start + _first_row_of_part(number * PARTS.across, PARTS) + _rows_of_part(ROWS, OUT)
            s = _weights(weight_ptr, row, end, WEIGHTED, OUT)
            sums = _narrowed(gl.zeros([ROWS, COLUMNS], gl.float32, layout=OUT), ROWS, COLUMNS)
            sums = _finish_by_turns(
                sums, of_rows[number], s, h, outs, left, H, number * PARTS.across, BN, GROUP_OF_WARPS, ACT, GATED, PARTS
            )
            ds = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, OUT))
            if ds_ptr is not None:
                gl.store(ds_ptr + (row + col_tile.to(gl.int64) * n_rows), ds, mask=row < end)


@jit(do_not_specialize=["n_col_tiles", "n_rows"])
def dhidden_kernel(
    # Gradients of results [·, D]; which of them each row reads, [rows] int64; boxes [BK, BN] of all experts' matrices
    # below each other, [E·D, H]; router weights s, [rows] float32; pre-activations [rows, (2·)H], and boxes [BM, BK] of
    # them.
    dy_ptr, source_ptr, w_desc, weight_ptr, h_ptr, h_desc,
    # dH as H, A [rows, H] and the column tiles' parts of ⟨dA', A⟩, [n_col_tiles, n_rows] float32; each may be None.
    dh_ptr, a_ptr, ds_ptr,
    tiles_ptr, used_ptr, ends_ptr, D, H, n_rows, n_col_tiles,
    # Without WEIGHTED, s is 1. EVEN: BK divides D (it always divides BN).
    ACT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr, EVEN: gl.constexpr,
    # LAG is at most STAGES - 2.
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    # AHEAD: by turns, of how many parts H is on its way while one is finished.
    PINGPONG: gl.constexpr, AHEAD: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = blocks(BM, BN, BK, GROUP, STAGES, LAG, PINGPONG)
    HALVES: gl.constexpr = 2 if GATED else 1
    BOXES: gl.constexpr = HALVES * (BN // BK)
    dy_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BK, BN], w_desc.layout)
    bufs = (dy_bufs, w_bufs)
    ring = make_ring(2, BLOCKS)
    table = (tiles_ptr, ends_ptr, gl.load(used_ptr), n_col_tiles)
    sizes = (D, H)
    rows = (dy_ptr, source_ptr)
    if PINGPONG:
        PARTS: gl.constexpr = _parts(BLOCKS, AHEAD)
        boxes: gl.constexpr = [2 * (AHEAD + 1) * HALVES, PARTS.rows, PARTS.columns]
        h_bufs = gl.allocate_shared_memory(w_desc.dtype, boxes, _kept_layout())
        of_tile = ((weight_ptr, n_rows), (h_ptr, h_bufs), dh_ptr, a_ptr, ds_ptr, bufs, ring, table, sizes)
        gl.warp_specialize(
            [
                (_multiply_by_turns, (of_tile, 0, ACT, GATED, WEIGHTED, PARTS, BLOCKS)),
                (_multiply_by_turns, (of_tile, 1, ACT, GATED, WEIGHTED, PARTS, BLOCKS)),
                (load_gathered_ahead, (rows, n_rows, w_desc, bufs, ring, table, sizes, EVEN, BLOCKS)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        of_tile = ((weight_ptr, n_rows), (h_ptr, dy_bufs), dh_ptr, a_ptr, ds_ptr, bufs, ring, table, sizes)
        gl.warp_specialize(
            [
                (_multiply, (of_tile, 0, ACT, GATED, WEIGHTED, BLOCKS)),
                (_multiply, (of_tile, 1, ACT, GATED, WEIGHTED, BLOCKS)),
                (load_gathered, (rows, w_desc, h_desc, bufs, ring, table, sizes, HALVES, False, BOXES, EVEN, BLOCKS)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
