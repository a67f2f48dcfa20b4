"""Epilogues on some columns of a tile: bias, activation and stores, by 16 bytes per thread or by boxes.

A box is a piece of a tile in shared memory, stored by one asynchronous bulk copy (TMA's term). Threads store a box that
extends past an expert's last row: a bulk copy would overwrite the next expert's rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fusedmoe.kernels.gluon.grouped.pipeline import bulk_store, mma_layout, threads_barrier


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()


@gluon.constexpr_function
def store_layout(columns):
    vector = min(8, columns)
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def sigmoid(x):
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], gl.float32, True, 1
    )
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], gl.float32, True, 1)


@gluon.jit
def act_forward(x, ACT: gl.constexpr):
    if ACT == 0:
        return x * sigmoid(x)
    elif ACT == 1:
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return gl.where(x <= 0.0, 0.0, x)  # keeps NaN


@gluon.jit
def act_both(x, ACT: gl.constexpr):
    if ACT == 0:
        s = sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == 1:
        cdf = 0.5 * (1.0 + gl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * gl.exp(-0.5 * x * x)
    elif ACT == 2:
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        return act_forward(x, ACT), gl.where(x > 0.0, 1.0, 0.0)


@gluon.jit
def add_bias(x, bias_ptr, first, start, column, COLUMNS):
    inside = (column >= start) & (column < start + COLUMNS)
    bias = gl.load(bias_ptr + (first + column - start), mask=inside, other=0.0)
    return x + bias.to(gl.float32)[None, :]


@gluon.jit
def store_columns(x, ptr, row, end, column, STRIDE, COLUMNS):
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    offset = row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.store(ptr + offset, x.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def add_columns(x, ptr, row, end, column, STRIDE, COLUMNS):
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    offset = row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    return x + gl.load(ptr + offset, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def store_box(
    x, out, out_bufs, slot, row, end, column, STRIDE, COLUMNS,
    ROWS: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Store WIDE columns of a warp group's rows through shared memory.

    Uses a bulk (TMA) copy if all ROWS rows are before `end`, else masked stores. `out`: the matrix's pointer, with rows
    STRIDE apart, and its TMA descriptor of boxes [ROWS, WIDE]. `slot`: index of this box in `out_bufs`; each group
    cycles through SLOTS of them.
    """
    ptr, desc = out
    box = out_bufs.index(slot)
    # Only the thread that started a bulk copy can wait for it.
    tma.store_wait(SLOTS - 1)
    threads_barrier()
    box.store(x.to(ptr.dtype.element_ty))
    # Each thread fences its writes; one thread starts the copy for all.
    fence_async_shared()
    threads_barrier()
    if row + ROWS <= end:
        bulk_store(desc, [row, column], box)
    else:
        OUT: gl.constexpr = store_layout(WIDE)
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        columns = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, OUT))
        store_columns(box.load(OUT), ptr, rows, end, columns, STRIDE, COLUMNS)
        tma.store_wait(0)


@gluon.jit
def store_boxes(
    x, bias_ptr, out, out_bufs, slot, expert, row, end, column, N, bias_sizes,
    PART: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Store WIDTH columns of a tile in boxes of WIDE columns, after adding row `expert` of the bias if BIAS.

    Recursion halves the tile; PART is the number of the tile's boxes to the left. `slot` is the index in `out_bufs` of
    the first of the warp group's SLOTS boxes.
    """
    if WIDTH > WIDE:
        HALF: gl.constexpr = WIDTH // 2
        NEXT: gl.constexpr = PART + HALF // WIDE
        left, right = halves(x, ROWS, WIDTH)
        store_boxes(
            left, bias_ptr, out, out_bufs, slot, expert, row, end, column, N, bias_sizes,
            PART, ROWS, HALF, WIDE, SLOTS, BIAS,
        )  # fmt: skip
        store_boxes(
            right, bias_ptr, out, out_bufs, slot, expert, row, end, column + HALF, N, bias_sizes,
            NEXT, ROWS, HALF, WIDE, SLOTS, BIAS,
        )  # fmt: skip
    else:
        MMA: gl.constexpr = mma_layout(WIDE)
        x = gl.convert_layout(x, MMA)
        if BIAS:
            bias_start, bias_columns = bias_sizes
            columns = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, MMA))
            x = add_bias(x, bias_ptr, expert * bias_columns, bias_start, columns, bias_columns)
        store_box(x, out, out_bufs, slot + PART % SLOTS, row, end, column, N, N, ROWS, WIDE, SLOTS)


@gluon.jit
def store_tile(acc, ptr, first_row, end, first_column, COLUMNS, total_ptr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Store a tile of a matrix with COLUMNS columns. Adds the tile at `total_ptr`, if given, which may be `ptr`."""
    WIDE: gl.constexpr = BN // 4
    OUT: gl.constexpr = store_layout(WIDE)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    column = first_column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, OUT))
    # All columns at once would not fit the registers.
    left, right = halves(acc, ROWS, BN)
    for half in gl.static_range(2):
        first, second = halves(left if half == 0 else right, ROWS, BN // 2)
        for quarter in gl.static_range(2):
            part = first if quarter == 0 else second
            at = column + (2 * half + quarter) * WIDE
            if total_ptr is not None:
                x = gl.convert_layout(part, OUT)
                x = add_columns(x, total_ptr, row, end, at, COLUMNS, COLUMNS)
            else:
                # Narrowing first halves the traffic through shared memory.
                x = gl.convert_layout(part.to(ptr.dtype.element_ty), OUT)
            store_columns(x, ptr, row, end, at, COLUMNS, COLUMNS)
