"""Loads where some rows are looked up: those come by asynchronous copies of threads, everything else by bulk ones.

Tensor cores read shared memory through another path than threads copy into it. So the threads that copied wait for
their copies, fence, wait for each other, and only then say that a stage is full. They do that LAG steps late, so that
copies of some steps are always under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, tma

from fusedmoe.kernels.gluon.grouped.pipeline import announce, await_empty, fill, locate, threads_barrier, tiles_in


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
def end_step(full, it, STAGES: gl.constexpr, LAG: gl.constexpr, since=0):
    """All copies of this step have been started: the one LAG steps before is shown, of those from `since` on."""
    async_copy.commit_group()
    _show(full, it, STAGES, LAG, it >= since + LAG)


@gluon.jit
def end_steps(full, it, STAGES: gl.constexpr, LAG: gl.constexpr):
    """This step does not come: those before it are shown."""
    for step in gl.static_range(LAG):
        _show(full, it - 1, STAGES, LAG - 1 - step, it - LAG + step >= 0)


@gluon.jit
def box_of_group(bufs, stage, HALF: gl.constexpr, GROUP_OF_WARPS: gl.constexpr, BLOCKS: gl.constexpr):
    """A group's rows of bk columns in a stage that holds no step of the product but a box of one half of a matrix, or
    of both: the second lies where the columns of b do, beside the other group's."""
    a_bufs, b_bufs = bufs
    ROWS: gl.constexpr = BLOCKS.bm // 2
    if HALF == 0:
        return a_bufs.index(stage).slice(GROUP_OF_WARPS * ROWS, ROWS, 0)
    else:
        return b_bufs.index(stage).slice(GROUP_OF_WARPS * BLOCKS.bk, BLOCKS.bk, 1).slice(0, ROWS, 0)


@gluon.jit
def _load_boxes(
    h_desc, bufs, ring, it, since, start, column, H,
    HALVES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The steps that end a tile. What is left of its product's, which began with the step `since`, is shown."""
    full, empty, _ = ring
    STAGES: gl.constexpr = BLOCKS.stages
    LAG: gl.constexpr = BLOCKS.lag
    ROWS: gl.constexpr = BLOCKS.bm // 2
    BK: gl.constexpr = BLOCKS.bk
    BOXES: gl.constexpr = BLOCKS.bn // BK
    BYTES: gl.constexpr = h_desc.dtype.primitive_bitwidth // 8
    for box in range(0, BOXES):
        await_empty(empty, it, STAGES)
        announce(full, it, STAGES, HALVES * BLOCKS.bm * BK * BYTES)
        fill(full, it, STAGES, True)  # threads copy nothing
        bar = full.index(it % STAGES)
        # Rows past the end are another expert's, or none: what is computed of them is not stored.
        for half in gl.static_range(HALVES):
            for group in gl.static_range(2):
                place = [start + group * ROWS, half * H + column + box * BK]
                tma.async_copy_global_to_shared(
                    h_desc, place, bar, box_of_group(bufs, it % STAGES, half, group, BLOCKS)
                )
        async_copy.commit_group()
        _show(full, it, STAGES, LAG, (box < LAG) & (it >= since + LAG))
        it += 1
    for step in gl.static_range(LAG - BOXES):
        _show(full, it - 1, STAGES, LAG - 1 - step, it + step >= since + LAG)
    return it


@gluon.jit
def load_gathered(
    rows, w_desc, h_desc, bufs, ring, table, sizes,
    HALVES: gl.constexpr, TRANSPOSED: gl.constexpr, BOXES: gl.constexpr, EVEN: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The partition that loads gathered rows of depth D, and of matrices of H columns.

    TRANSPOSED: those are [E·HALVES·H, D], and a tile has bn / HALVES columns of each half; else they are [E·D, H].
    BOXES: a tile ends with a step for each bk of its columns. It brings [bm, bk] of each half of `h_desc`'s matrix,
    sorted rows of HALVES·H columns, in boxes of half the rows (`box_of_group`). EVEN: bk divides D.
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
    since = 0
    for tile in range(gl.program_id(0), tiles_in(table), gl.num_programs(0)):
        expert, start, end, col_tile = locate(tile, table, BLOCKS.group)
        if BOXES:
            since = it
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
                    tma.async_copy_global_to_shared(w_desc, [w_row, k0], bar, w_buf.slice(half * BH, BH, 0))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert * D + k0, col_tile * BH], bar, w_buf)
            if EVEN:
                async_copy.async_copy_global_to_shared(x_bufs.index(it % STAGES), x_ptrs)
            else:
                mask = (k < D - k0)[None, :]
                async_copy.async_copy_global_to_shared(x_bufs.index(it % STAGES), x_ptrs, mask=mask)
            x_ptrs += BK
            end_step(full, it, STAGES, BLOCKS.lag, since)
            it += 1
        if BOXES:
            it = _load_boxes(h_desc, bufs, ring, it, since, start, col_tile * BH, H, HALVES, BLOCKS)
    if not BOXES:
        end_steps(full, it, STAGES, BLOCKS.lag)
