"""Producer whose threads load gathered rows by asynchronous copies; everything else is loaded by bulk copies.

Tensor cores read shared memory through the async proxy, unlike thread copies. The copying threads therefore wait for
their copies, fence, synchronize, and only then mark a stage as full. They do so LAG steps late, which keeps copies of
several steps in flight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from fusedmoe.kernels.gluon.grouped.pipeline import (
    await_empty,
    bulk_load,
    copy_rows,
    expect_bytes,
    locate,
    mark_filled,
    threads_barrier,
    tiles_in,
)


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
def _end_step(full, it, STAGES: gl.constexpr, LAG: gl.constexpr):
    async_copy.commit_group()
    _mark_full(full, it, STAGES, LAG, it >= LAG)


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
    NUM_PROJECTIONS: gl.constexpr, TRANSPOSED: gl.constexpr, BOXES: gl.constexpr, EVEN: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Run the producer partition that loads gathered rows of depth D and matrices of H columns.

    TRANSPOSED: matrices are [E·NUM_PROJECTIONS·H, D], and a tile has bn / NUM_PROJECTIONS columns of each projection;
    otherwise they are [E·D, H]. BOXES: number of additional steps per tile, each loading [bm, bk] of `h_desc`, sorted
    rows of NUM_PROJECTIONS·H columns: the tile's columns, bk of each projection alternately. EVEN: bk divides D.
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
            _end_step(full, it, STAGES, BLOCKS.lag)
            it += 1
        if BOXES > 0:
            for box in range(0, BOXES):
                await_empty(empty, it, STAGES)
                expect_bytes(full, it, STAGES, BM * BK * BYTES)
                # Rows past the end, of another expert or of none, are not stored.
                column = col_tile * BH + (box // NUM_PROJECTIONS) * BK + (box % NUM_PROJECTIONS) * H
                bar = full.index(it % STAGES)
                bulk_load(h_desc, [start, column], bar, x_bufs.index(it % STAGES))
                _end_step(full, it, STAGES, BLOCKS.lag)
                it += 1
    end_steps(full, it, 0, STAGES, BLOCKS.lag)
