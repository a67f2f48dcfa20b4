"""The ring of stages between the partition that loads and the two that multiply.

Step `it`, counted over all tiles of a program, has stage it % STAGES. `full` of a stage completes when all of a step
has come, `empty` when both groups have read it; each phase of either is one turn of the ring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# A barrier of a partition's threads; renamed after Triton 3.6.
threads_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def make_ring(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """The barriers. ARRIVALS: how often the loading partition arrives in a step."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()  # so that bulk copies find barriers that are initialised
    return full, empty


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


@gluon.jit
def multiply(
    bufs,
    ring,
    it,
    depth,
    GROUP: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
):
    """Rows of one group, 0 or 1, of a tile's product, and the step that comes next.

    A stage holds [BM, BK] of a, or transposed [BK, BM], and [BK, BN] of b, or transposed [BN, BK]. One product is in
    flight while the next is awaited, so a stage is given back a step late. Without depth there is no step.
    """
    a_bufs, b_bufs = bufs
    full, empty = ring
    ROWS: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    acc = gl.zeros([ROWS, BN], gl.float32, mma)
    for k0 in range(0, depth, BK):
        await_full(full, it, STAGES)
        if A_TRANSPOSED:
            a_buf = a_bufs.index(it % STAGES).slice(GROUP * ROWS, ROWS, 1).permute((1, 0))
        else:
            a_buf = a_bufs.index(it % STAGES).slice(GROUP * ROWS, ROWS, 0)
        b_buf = b_bufs.index(it % STAGES)
        if B_TRANSPOSED:
            b_buf = b_buf.permute((1, 0))
        acc = warpgroup_mma(a_buf, b_buf, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        release(empty, it + STAGES - 1, STAGES, k0 > 0)
        it += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(empty, it + STAGES - 1, STAGES, depth > 0)
    return acc, it
