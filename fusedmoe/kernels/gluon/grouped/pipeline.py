"""The ring of stages between the partition that loads and the two that multiply.

Step `it`, counted over all tiles of a program, has stage it % STAGES. `full` of a stage completes when all of a step
has come, `empty` when all that multiply it have read it; each phase of either is one turn of the ring.

The two groups share each tile, half of its rows each; or (PINGPONG) they take tiles by turns, and one multiplies while
the other finishes what it has multiplied. A wait tells odd phases from even ones alone: a group that is ahead would
take a phase of the other's for its own. So it begins once all the other's steps have come (`turn`).
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

# A barrier of a partition's threads; renamed after Triton 3.6.
threads_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Copies by threads and bulk copies; renamed in Triton 3.9.
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
bulk_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
bulk_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@dataclass(frozen=True)
class Blocks:
    """A kernel's tiles [bm, bn], in bands of `group` row tiles; its steps of depth bk, in a ring of `stages`. `lag`:
    how many steps later copies of threads are waited for; `pingpong`: the two groups take turns."""

    bm: int
    bn: int
    bk: int
    group: int
    stages: int
    lag: int
    pingpong: bool


@gluon.constexpr_function
def blocks(bm, bn, bk, group, stages, lag=0, pingpong=False):
    # A group gives a stage back once it has the next: with more in flight, all would wait for each other.
    assert lag + 2 <= stages
    return Blocks(bm, bn, bk, group, stages, lag, pingpong)


@gluon.jit
def make_ring(ARRIVALS: gl.constexpr, BLOCKS: gl.constexpr):
    """The barriers. ARRIVALS: how often the loading partition arrives in a step."""
    STAGES: gl.constexpr = BLOCKS.stages
    READERS: gl.constexpr = 1 if BLOCKS.pingpong else 2
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=READERS)
    # Whose turn it is; without turns nobody looks at it.
    if BLOCKS.pingpong:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(2):
            mbarrier.init(turn.index(group), count=1)
    else:
        turn = empty
    fence_async_shared()  # so that bulk copies find barriers that are initialised
    return full, empty, turn


@gluon.jit
def await_empty(empty, it, STAGES: gl.constexpr):
    # Nothing has to be read before the first turn: the phase before the first counts as complete.
    mbarrier.wait(empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)


@gluon.jit
def await_full(full, it, STAGES: gl.constexpr):
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)


@gluon.jit
def announce(full, it, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """This many bytes come by bulk copies."""
    mbarrier.expect(full.index(it % STAGES), BYTES)


@gluon.jit
def fill(full, it, STAGES: gl.constexpr, pred):
    """The part that threads have copied is there."""
    mbarrier.arrive(full.index(it % STAGES), count=1, pred=pred)


@gluon.jit
def release(empty, it, STAGES: gl.constexpr, pred):
    """One group has read this step."""
    mbarrier.arrive(empty.index(it % STAGES), count=1, pred=pred)


@gluon.constexpr_function
def rows_of_group(rows, pingpong):
    """Returns how many of a tile's rows a group computes."""
    return rows if pingpong else rows // 2


@gluon.constexpr_function
def first_row(group, rows, pingpong):
    """Returns the first of a group's rows in a tile."""
    return 0 if pingpong else group * (rows // 2)


@gluon.jit
def await_turn(turn, number, GROUP: gl.constexpr):
    """Waits for the turn of a group's tile of this number. The first group has the first turn."""
    mbarrier.wait(turn.index(GROUP), (number + 1 + GROUP) & 1)


@gluon.jit
def pass_turn(turn, GROUP: gl.constexpr):
    """All steps of this group's tile have come."""
    mbarrier.arrive(turn.index(1 - GROUP), count=1)


@gluon.jit
def tiles_of_group(depth, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """A group's first tile, how many tiles further the next is, its first step, and steps of the other's between two
    tiles of its own. Where groups take turns all tiles have this depth."""
    if BLOCKS.pingpong:
        steps = gl.cdiv(depth, BLOCKS.bk)
        return gl.program_id(0) + GROUP * gl.num_programs(0), 2 * gl.num_programs(0), GROUP * steps, steps
    else:
        return gl.program_id(0), gl.num_programs(0), 0, 0


@gluon.constexpr_function
def multiplied_layout(columns):
    """Returns the layout in which a group of four warps has a product of this many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def multiply(
    bufs, ring, it, depth,
    GROUP: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The rows of a tile's product that are one group's, 0 or 1, and the step that comes next.

    A stage holds [bm, bk] of a, or transposed [bk, bm], and [bk, bn] of b, or transposed [bn, bk]. One product is in
    flight while the next is awaited, so a stage is given back a step late. Without depth there is no step.
    """
    a_bufs, b_bufs = bufs
    full, empty, turn = ring
    ROWS: gl.constexpr = rows_of_group(BLOCKS.bm, BLOCKS.pingpong)
    FIRST: gl.constexpr = first_row(GROUP, BLOCKS.bm, BLOCKS.pingpong)
    BN: gl.constexpr = BLOCKS.bn
    STAGES: gl.constexpr = BLOCKS.stages
    mma: gl.constexpr = multiplied_layout(BN)
    acc = gl.zeros([ROWS, BN], gl.float32, mma)
    if BLOCKS.pingpong:
        await_turn(turn, it // (2 * gl.cdiv(depth, BLOCKS.bk)), GROUP)
    for k0 in range(0, depth, BLOCKS.bk):
        await_full(full, it, STAGES)
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
def place(tile, n_row_tiles, n_col_tiles, GROUP: gl.constexpr):
    """Row and column tile: bands of GROUP row tiles, so that a band's operands stay in the L2 cache."""
    band = GROUP * n_col_tiles
    first = (tile // band) * GROUP
    height = gl.minimum(n_row_tiles - first, GROUP)
    return first + (tile % band) % height, (tile % band) // height


@gluon.jit
def tiles_in(table):
    """Returns the number of tiles. Programs walk them: from their own number on, in steps of as many as there are."""
    _, _, n_row_tiles, n_col_tiles = table
    return n_row_tiles * n_col_tiles


@gluon.jit
def locate(tile, table, GROUP: gl.constexpr):
    """Expert of a tile, its first row, the end of the expert's rows, and its column tile."""
    tiles_ptr, ends_ptr, n_row_tiles, n_col_tiles = table
    row_tile, col_tile = place(tile, n_row_tiles, n_col_tiles, GROUP)
    expert = gl.load(tiles_ptr + 2 * row_tile)
    start = gl.load(tiles_ptr + 2 * row_tile + 1)
    return expert, start, gl.load(ends_ptr + expert), col_tile
