"""Kernels of a few lines for the interpreter's own tests."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedmoe.kernels.gluon.grouped.pipeline import bulk_load, copy_rows, threads_barrier


@gluon.jit
def fence_barriers():
    fence_async_shared()


@gluon.jit
def fence_rows():
    fence_async_shared()


@gluon.jit
def hand_full(bar):
    mbarrier.arrive(bar, count=1)


@gluon.jit
def hand_back(bar):
    mbarrier.arrive(bar, count=1)


@gluon.jit
def make_barriers():
    """Barriers of two stages: full, and empty."""
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_barriers()
    return full, empty


@gluon.jit
def places(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of a square's elements."""
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    return row[:, None] * SIZE + column[None, :]


@gluon.jit
def by_threads(x_ptr, bufs, full, empty, N, SIZE: gl.constexpr, LATE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in range(N):
        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        ptrs = x_ptr + i * SIZE * SIZE + places(SIZE, layout)
        if LATE:
            copy_rows(bufs.index(i % 2), ptrs)
            async_copy.commit_group()
            async_copy.wait_group(0)
        else:
            bufs.index(i % 2).store(gl.load(ptrs))
        fence_rows()
        threads_barrier()
        hand_full(full.index(i % 2))


@gluon.jit
def bulk(x_desc, bufs, full, empty, N, SIZE: gl.constexpr):
    for i in range(N):
        bar = full.index(i % 2)
        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        mbarrier.expect(bar, SIZE * SIZE * 2)
        bulk_load(x_desc, [i * SIZE, 0], bar, bufs.index(i % 2))


@gluon.jit
def square(out_ptr, bufs, full, empty, N, SIZE: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16])
    acc = gl.zeros([SIZE, SIZE], gl.float32, mma)
    for i in range(N):
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        buf = bufs.index(i % 2)
        acc = warpgroup_mma(buf, buf.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        hand_back(empty.index(i % 2))
    gl.store(out_ptr + places(SIZE, mma), acc)


@gluon.jit
def squares_kernel(x, out_ptr, N, HOW: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """out = Σ x_i·x_iᵀ; the x_i reach shared memory by bulk copy, cp.async or ordinary stores."""
    bufs = gl.allocate_shared_memory(gl.bfloat16, [2, SIZE, SIZE], LAYOUT)
    full, empty = make_barriers()
    if HOW == "bulk":
        gl.warp_specialize(
            [(square, (out_ptr, bufs, full, empty, N, SIZE)), (bulk, (x, bufs, full, empty, N, SIZE))], [1], [40]
        )
    else:
        gl.warp_specialize(
            [
                (square, (out_ptr, bufs, full, empty, N, SIZE)),
                (by_threads, (x, bufs, full, empty, N, SIZE, HOW == "copy")),
            ],
            [4],
            [40],
        )


@gluon.jit
def read_back(out_ptr, bufs, full, empty, N, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in range(N):
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        x = bufs.index(i % 2).load(layout)
        fence_rows()
        threads_barrier()
        hand_back(empty.index(i % 2))
        gl.store(out_ptr + i * SIZE * SIZE + places(SIZE, layout), x)


@gluon.jit
def copies_kernel(x, out_ptr, N, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """out = x, by bulk copies into shared memory and reads of threads."""
    bufs = gl.allocate_shared_memory(gl.bfloat16, [2, SIZE, SIZE], LAYOUT)
    full, empty = make_barriers()
    gl.warp_specialize(
        [(read_back, (out_ptr, bufs, full, empty, N, SIZE)), (bulk, (x, bufs, full, empty, N, SIZE))], [1], [40]
    )
