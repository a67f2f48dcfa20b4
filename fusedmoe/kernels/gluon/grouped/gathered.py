"""Loads where some rows are looked up: those come by asynchronous copies of threads, everything else by bulk ones.

Tensor cores read shared memory through another path than threads copy into it. So the threads that copied wait for
their copies, fence, wait for each other, and only then say that a stage is full. They do that LAG steps late, so that
copies of some steps are always under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from fusedmoe.kernels.gluon.grouped.pipeline import (
    announce,
    await_empty,
    bulk_load,
    copy_rows,
    fill,
    locate,
    threads_barrier,
    tiles_in,
)


@gluon.constexpr_function
def copied_layout(columns):
    """Returns the layout in which four warps copy a box of so many columns, 16 bytes a thread, 64 abreast at most."""
    across = min(columns, 64) // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _show(full, it, STAGES: gl.constexpr, BEHIND: gl.constexpr, pred):
    """Rows of the step before the last BEHIND, of which there may be none, are there for the tensor cores to read."""
    async_copy.wait_group(BEHIND)
    fence_async_shared()
    # One thread says so for all, whose fences it would not wait for.
    threads_barrier()
    fill(full, it + STAGES - BEHIND, STAGES, pred)


@gluon.jit
def _end_step(full, it, STAGES: gl.constexpr, LAG: gl.constexpr):
    """All copies of this step have been started: the one LAG steps before is shown."""
    async_copy.commit_group()
    _show(full, it, STAGES, LAG, it >= LAG)


@gluon.jit
def begin_step(full, it, first, STAGES: gl.constexpr, LAG: gl.constexpr):
    """Shows the step LAG before, from the first on, before this step's copies are started, as the fence may wait for
    those: in place of `_end_step`, where rows are looked up beside."""
    gl.static_assert(LAG > 0)
    _show(full, it - 1, STAGES, LAG - 1, it - LAG >= first)


@gluon.jit
def end_steps(full, it, first, STAGES: gl.constexpr, LAG: gl.constexpr):
    """This step does not come yet: those before it are shown, from the first on."""
    for step in gl.static_range(LAG):
        _show(full, it - 1, STAGES, LAG - 1 - step, it - LAG + step >= first)


@gluon.jit
def load_gathered(
    rows, w_desc, h_desc, bufs, ring, table, sizes,
    HALVES: gl.constexpr, TRANSPOSED: gl.constexpr, BOXES: gl.constexpr, EVEN: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The partition that loads gathered rows of depth D, and of matrices of H columns.

    TRANSPOSED: those are [E·HALVES·H, D], and a tile has bn / HALVES columns of each half; else they are [E·D, H].
    BOXES: as many more steps end a tile, which bring [bm, bk] of `h_desc` each, sorted rows of HALVES·H columns: of
    columns as the tile's, bk of each half by turns. EVEN: bk divides D.
    """
    BM: gl.constexpr = BLOCKS.bm
    BN: gl.constexpr = BLOCKS.bn
    BK: gl.constexpr = BLOCKS.bk
    STAGES: gl.constexpr = BLOCKS.stages
    x_ptr, source_ptr = rows
    x_bufs, w_bufs = bufs
    full, empty, _ = ring
    D, H = sizes
    # A multiple of 8 that the compiler can see is one: it copies 16 bytes at a time.
    D = D // 8 * 8
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    COPIED: gl.constexpr = copied_layout(BK)
    BH: gl.constexpr = BN // HALVES if TRANSPOSED else BN
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, COPIED))
    it = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        # Rows past the end are clamped: what is computed of them is not stored.
        row = gl.minimum(start + gl.arange(0, BM, layout=gl.SliceLayout(1, COPIED)), end - 1)
        # No GPU holds 2^31 such rows; in 32 bits their numbers take half as many of the few registers there are.
        source = gl.load(source_ptr + row).to(gl.int32).to(gl.int64)
        x_ptrs = x_ptr + source[:, None] * D + k[None, :]
        for k0 in range(0, D, BK):
            await_empty(empty, it, STAGES)
            announce(full, it, STAGES, BN * BK * BYTES)
            bar = full.index(it % STAGES)
            w_buf = w_bufs.index(it % STAGES)
            if TRANSPOSED:
                for half in gl.static_range(HALVES):
                    w_row = (expert * HALVES + half) * H + col_tile * BH
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
                announce(full, it, STAGES, BM * BK * BYTES)
                # Rows past the end are another expert's, or none: what is computed of them is not stored.
                column = col_tile * BH + (box // HALVES) * BK + (box % HALVES) * H
                bar = full.index(it % STAGES)
                bulk_load(h_desc, [start, column], bar, x_bufs.index(it % STAGES))
                _end_step(full, it, STAGES, BLOCKS.lag)
                it += 1
    end_steps(full, it, 0, STAGES, BLOCKS.lag)
