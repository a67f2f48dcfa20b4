"""Ring of stages in shared memory between the producer partition and the two consumer warp groups.

Step `it`, counted over all tiles of a program, uses stage it % STAGES. A stage's `full` barrier completes
when a step is loaded, `empty` when all its consumers have read it.

Without PINGPONG, each group multiplies half the rows of every tile. With PINGPONG, the groups take whole
tiles in turn: one multiplies while the other runs its epilogue. A barrier wait checks only whether the pass
around the ring is even or odd, so a group too far ahead could mistake an earlier pass, loaded for the other
group, for its own. A group therefore starts a tile only once the other group has seen all steps of the
preceding tile loaded (barrier `turn`).

`load_gathered` is a producer whose threads load gathered rows by asynchronous copies; everything else is loaded by bulk
copies. Tensor cores read shared memory through the async proxy, unlike thread copies, so a fence must lie between. The
copying threads therefore wait for their copies, fence, synchronize, and only then mark a stage as full. They do so LAG
steps late, which keeps copies of several steps in flight. With COPIES_ARRIVE the copies themselves arrive at the "full"
barrier, once for each copying thread, and the multiplying threads fence after they have waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Renamed after Triton 3.6.
threads_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Renamed in Triton 3.9.
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
bulk_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
bulk_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of a kernel: tiles [bm, bn], K steps of depth bk, and a ring of `stages` steps in shared memory.

    Tiles run in bands of `group` row tiles, whose operands stay in the L2 cache. A producer waits for its thread copies
    `lag` steps later, or not at all if `copies_arrive`.
    """

    bm: int
    bn: int
    bk: int
    group: int
    stages: int
    lag: int
    pingpong: bool
    copies_arrive: bool


@gluon.constexpr_function
def blocks(bm, bn, bk, group, stages, lag=0, pingpong=False, copies_arrive=False):
    # A group releases a stage only after it has the next: more steps in flight would deadlock.
    assert lag + 2 <= stages
    return Blocks(bm, bn, bk, group, stages, lag, pingpong, copies_arrive)


@gluon.constexpr_function
def gathered_arrivals(copies_arrive):
    """Return the arrivals of `load_gathered` per step: for bulk copies, and by its four warps or by their copies."""
    return 1 + (128 if copies_arrive else 1)


@gluon.jit
def make_ring(ARRIVALS: gl.constexpr, BLOCKS: gl.constexpr):
    """Allocate the barriers. ARRIVALS: of the producer partition per step."""
    STAGES: gl.constexpr = BLOCKS.stages
    READERS: gl.constexpr = 1 if BLOCKS.pingpong else 2
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=READERS)
    if BLOCKS.pingpong:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(2):
            mbarrier.init(turn.index(group), count=1)
    else:
        turn = empty
    fence_async_shared()  # makes the initialized barriers visible to bulk copies
    return full, empty, turn


@gluon.jit
def await_empty(empty, it, STAGES: gl.constexpr):
    # The phase before the first pass counts as complete.
    mbarrier.wait(empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)


@gluon.jit
def await_full(full, it, STAGES: gl.constexpr):
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)


@gluon.jit
def expect_bytes(full, it, STAGES: gl.constexpr, BYTES: gl.constexpr):
    mbarrier.expect(full.index(it % STAGES), BYTES)


@gluon.jit
def mark_filled(full, it, STAGES: gl.constexpr, pred):
    mbarrier.arrive(full.index(it % STAGES), count=1, pred=pred)


@gluon.jit
def release(empty, it, STAGES: gl.constexpr, pred):
    mbarrier.arrive(empty.index(it % STAGES), count=1, pred=pred)


@gluon.constexpr_function
def rows_of_group(rows, pingpong):
    return rows if pingpong else rows // 2


@gluon.constexpr_function
def first_row(group, rows, pingpong):
    return 0 if pingpong else group * (rows // 2)


@gluon.jit
def await_turn(turn, number, GROUP: gl.constexpr):
    """Wait for the turn of a group's tile `number`. The first group has the first turn."""
    mbarrier.wait(turn.index(GROUP), (number + 1 + GROUP) & 1)


@gluon.jit
def pass_turn(turn, GROUP: gl.constexpr):
    mbarrier.arrive(turn.index(1 - GROUP), count=1)


@gluon.jit
def tiles_of_group(depth, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """Return a group's first tile, tile stride, first ring step, and the steps to skip after each of its tiles.

    If the groups alternate, the skipped steps belong to the other group; all tiles then have this depth.
    """
    if BLOCKS.pingpong:
        steps = gl.cdiv(depth, BLOCKS.bk)
        return gl.program_id(0) + GROUP * gl.num_programs(0), 2 * gl.num_programs(0), GROUP * steps, steps
    else:
        return gl.program_id(0), gl.num_programs(0), 0, 0


@gluon.constexpr_function
def mma_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def multiply(
    bufs, ring, it, depth,
    GROUP: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Main loop of a GEMM: compute the rows of a tile that belong to consumer warp group GROUP (0 or 1).

    Returns the accumulator [rows, bn] and the index of the next ring step. `it`: index of the tile's first ring step;
    `depth`: K of the GEMM.

    A stage holds a as [bm, bk], or transposed [bk, bm], and b as [bk, bn], or transposed [bn, bk]. One MMA is in flight
    while the next stage is awaited, so a stage is released one step late.
    """
    a_bufs, b_bufs = bufs
    full, empty, turn = ring
    ROWS: gl.constexpr = rows_of_group(BLOCKS.bm, BLOCKS.pingpong)
    FIRST: gl.constexpr = first_row(GROUP, BLOCKS.bm, BLOCKS.pingpong)
    BN: gl.constexpr = BLOCKS.bn
    STAGES: gl.constexpr = BLOCKS.stages
    mma: gl.constexpr = mma_layout(BN)
    acc = gl.zeros([ROWS, BN], gl.float32, mma)
    if BLOCKS.pingpong:
        await_turn(turn, it // (2 * gl.cdiv(depth, BLOCKS.bk)), GROUP)
    for k0 in range(0, depth, BLOCKS.bk):
        await_full(full, it, STAGES)
        if BLOCKS.copies_arrive:
            fence_async_shared()
        if A_TRANSPOSED:
            a_buf = a_bufs.index(it % STAGES).slice(FIRST, ROWS, 1).permute((1, 0))
        else:
            a_buf = a_bufs.index(it % STAGES).slice(FIRST, ROWS, 0)
        b_buf = b_bufs.index(it % STAGES)
        if B_TRANSPOSED:
            b_buf = b_buf.permute((1, 0))
        acc = warpgroup_mma(a_buf, b_buf, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        release(empty, it + STAGES - 1, STAGES, k0 > 0)
        it += 1
    if BLOCKS.pingpong:
        pass_turn(turn, GROUP)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(empty, it + STAGES - 1, STAGES, depth > 0)
    return acc, it


@gluon.jit
def tile_position(tile, n_row_tiles, n_col_tiles, GROUP: gl.constexpr):
    band = GROUP * n_col_tiles
    first = (tile // band) * GROUP
    height = gl.minimum(n_row_tiles - first, GROUP)
    return first + (tile % band) % height, (tile % band) // height


@gluon.jit
def tiles_in(table):
    _, _, n_row_tiles, n_col_tiles = table
    return n_row_tiles * n_col_tiles


@gluon.jit
def locate(tile, table, GROUP: gl.constexpr):
    """Return a tile's expert, first row, end of the expert's rows, and column tile."""
    tiles_ptr, ends_ptr, n_row_tiles, n_col_tiles = table
    row_tile, col_tile = tile_position(tile, n_row_tiles, n_col_tiles, GROUP)
    expert = gl.load(tiles_ptr + 2 * row_tile)
    start = gl.load(tiles_ptr + 2 * row_tile + 1)
    return expert, start, gl.load(ends_ptr + expert), col_tile


@gluon.constexpr_function
def copy_layout(columns):
    across = min(columns, 64) // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _mark_full(full, it, STAGES: gl.constexpr, BEHIND: gl.constexpr, pred):
    """Wait for the copies of all but the last BEHIND steps, and mark the newest of these steps as full."""
    async_copy.wait_group(BEHIND)
    fence_async_shared()
    # Without a barrier, one thread would signal before the fences of the other threads.
    threads_barrier()
    mark_filled(full, it + STAGES - BEHIND, STAGES, pred)


@gluon.jit
def _arrive_with_copies(full, it, STAGES: gl.constexpr):
    """Have each thread arrive at the "full" barrier of step `it` once the thread's copies so far are complete."""
    async_copy.mbarrier_arrive(full.index(it % STAGES), increment_count=False)


@gluon.jit
def _end_step(full, it, BLOCKS: gl.constexpr):
    if BLOCKS.copies_arrive:
        _arrive_with_copies(full, it, BLOCKS.stages)
    else:
        async_copy.commit_group()
        _mark_full(full, it, BLOCKS.stages, BLOCKS.lag, it >= BLOCKS.lag)


@gluon.jit
def begin_step(full, it, first, STAGES: gl.constexpr, LAG: gl.constexpr):
    """Wait for the copies of step `it - LAG` and signal its "full" barrier, if the step is at least `first`. LAG > 0.

    Call before the copies of step `it` start. For producers that also prefetch row indices: `_end_step`, which does the
    same after the start, could wait there for the new copies.
    """
    gl.static_assert(LAG > 0)
    _mark_full(full, it - 1, STAGES, LAG - 1, it - LAG >= first)


@gluon.jit
def end_steps(full, it, first, STAGES: gl.constexpr, LAG: gl.constexpr):
    for step in gl.static_range(LAG):
        _mark_full(full, it - 1, STAGES, LAG - 1 - step, it - LAG + step >= first)


@gluon.jit
def load_gathered(
    rows, w_desc, h_desc, bufs, ring, table, sizes,
    NUM_PROJECTIONS: gl.constexpr, TRANSPOSED: gl.constexpr, NUM_BOXES: gl.constexpr, EVEN: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Run the producer partition that loads gathered rows of depth D and matrices of H columns.

    TRANSPOSED: matrices are [E·NUM_PROJECTIONS·H, D], and a tile has bn / NUM_PROJECTIONS columns of each projection;
    otherwise they are [E·D, H]. NUM_BOXES: number of additional steps per tile, each loading [bm, bk] of `h_desc`,
    sorted rows of NUM_PROJECTIONS·H columns: the tile's columns, bk of each projection alternately. EVEN: bk divides D.
    """
    BM: gl.constexpr = BLOCKS.bm
    BN: gl.constexpr = BLOCKS.bn
    BK: gl.constexpr = BLOCKS.bk
    STAGES: gl.constexpr = BLOCKS.stages
    x_ptr, source_ptr = rows
    x_bufs, w_bufs = bufs
    full, empty, _ = ring
    D, H = sizes
    # Copies are 16 bytes, so the compiler must see that D is a multiple of 8.
    D = D // 8 * 8
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    COPIED: gl.constexpr = copy_layout(BK)
    BH: gl.constexpr = BN // NUM_PROJECTIONS if TRANSPOSED else BN
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIED))
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        # Clamped: rows past the end are not stored.
        row = gl.minimum(start + gl.arange(0, BM, layout=gl.SliceLayout(1, COPIED)), end - 1)
        # No GPU holds 2^31 such rows; 32-bit indices take half of the scarce registers.
        source = gl.load(source_ptr + row).to(gl.int32).to(gl.int64)
        x_ptrs = x_ptr + source[:, None] * D + k[None, :]
        for k0 in range(0, D, BK):
            await_empty(empty, it, STAGES)
            expect_bytes(full, it, STAGES, BN * BK * BYTES)
            bar = full.index(it % STAGES)
            w_buf = w_bufs.index(it % STAGES)
            if TRANSPOSED:
                for half in gl.static_range(NUM_PROJECTIONS):
                    w_row = (expert * NUM_PROJECTIONS + half) * H + col_tile * BH
                    bulk_load(w_desc, [w_row, k0], bar, w_buf.slice(half * BH, BH, 0))
            else:
                bulk_load(w_desc, [expert * D + k0, col_tile * BH], bar, w_buf)
            if EVEN:
                copy_rows(x_bufs.index(it % STAGES), x_ptrs)
            else:
                mask = (k < D - k0)[None, :]
                copy_rows(x_bufs.index(it % STAGES), x_ptrs, mask=mask)
            x_ptrs += BK
            _end_step(full, it, BLOCKS)
            it += 1
        if NUM_BOXES > 0:
            for box in range(0, NUM_BOXES):
                await_empty(empty, it, STAGES)
                expect_bytes(full, it, STAGES, BM * BK * BYTES)
                # Rows past the end, of another expert or of none, are not stored.
                column = col_tile * BH + (box // NUM_PROJECTIONS) * BK + (box % NUM_PROJECTIONS) * H
                bar = full.index(it % STAGES)
                bulk_load(h_desc, [start, column], bar, x_bufs.index(it % STAGES))
                _end_step(full, it, BLOCKS)
                it += 1
    if not BLOCKS.copies_arrive:
        end_steps(full, it, 0, STAGES, BLOCKS.lag)
