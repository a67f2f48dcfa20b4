"""Work on some columns of a tile: bias, activation and stores, in rows of 16 bytes a thread or in boxes.

A box is copied by the copy engine, out of shared memory, while its group goes on. It would overwrite the rows behind an
expert's last: where a tile has such rows, threads store what the box holds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fusedmoe.kernels.gluon.grouped.pipeline import bulk_store, multiplied_layout, threads_barrier


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, COLUMNS] -> its left and its right half, without leaving registers."""
    return x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()


@gluon.constexpr_function
def stored_layout(columns):
    """Returns the layout in which four warps store this many columns, a power of two."""
    vector = min(8, columns)
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def sigmoid(x):
    """Computes 1 / (1 + exp(-x)) in four instructions, as the Triton kernels do."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], gl.float32, True, 1
    )
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], gl.float32, True, 1)


@gluon.jit
def act_forward(x, ACT: gl.constexpr):
    """act(x) in float32, by the codes of the Triton kernels."""
    if ACT == 0:
        return x * sigmoid(x)
    elif ACT == 1:
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return gl.where(x <= 0.0, 0.0, x)  # NaN stays


@gluon.jit
def act_both(x, ACT: gl.constexpr):
    """act(x) and act'(x)."""
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
    """Adds the bias of `first` to those columns that have one: COLUMNS from `start` on."""
    inside = (column >= start) & (column < start + COLUMNS)
    bias = gl.load(bias_ptr + (first + column - start), mask=inside, other=0.0)
    return x + bias.to(gl.float32)[None, :]


@gluon.jit
def store_columns(x, ptr, row, end, column, STRIDE, COLUMNS):
    """Stores those inside of the expert's rows and of the matrix."""
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    places = row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.store(ptr + places, x.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def add_columns(x, ptr, row, end, column, STRIDE, COLUMNS):
    """Adds what another matrix has where `store_columns` stores."""
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    places = row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    return x + gl.load(ptr + places, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def store_box(
    x, out, boxes, slot, row, end, column, STRIDE, COLUMNS,
    ROWS: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Stores WIDE columns of a group's rows. `out`: the matrix, whose rows are STRIDE apart, and a descriptor of boxes
    [ROWS, WIDE] of it; `slot`: of `boxes`, where each group has a ring of SLOTS. Calls take them by turns."""
    ptr, desc = out
    box = boxes.index(slot)
    # What was stored from this box has left it: the thread that started a bulk copy knows, and tells the others.
    tma.store_wait(SLOTS - 1)
    threads_barrier()
    box.store(x.to(ptr.dtype.element_ty))
    # Each thread fences what it wrote, and one thread starts the copy for all.
    fence_async_shared()
    threads_barrier()
    if row + ROWS <= end:
        bulk_store(desc, [row, column], box)
    else:
        OUT: gl.constexpr = stored_layout(WIDE)
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        columns = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, OUT))
        store_columns(box.load(OUT), ptr, rows, end, columns, STRIDE, COLUMNS)
        # Waits count bulk copies, and here is none to count.
        tma.store_wait(0)


@gluon.jit
def store_boxes(
    x, bias_ptr, out, boxes, slot, first, row, end, column, N, bias_sizes,
    PART: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Stores WIDTH columns of a tile, which are its boxes from PART on, with the bias of `first`, if there is one.
    `slot`: the group's first."""
    if WIDTH > WIDE:
        HALF: gl.constexpr = WIDTH // 2
        NEXT: gl.constexpr = PART + HALF // WIDE
        left, right = halves(x, ROWS, WIDTH)
        store_boxes(
            left, bias_ptr, out, boxes, slot, first, row, end, column, N, bias_sizes,
            PART, ROWS, HALF, WIDE, SLOTS, BIAS,
        )  # fmt: skip
        store_boxes(
            right, bias_ptr, out, boxes, slot, first, row, end, column + HALF, N, bias_sizes,
            NEXT, ROWS, HALF, WIDE, SLOTS, BIAS,
        )  # fmt: skip
    else:
        MMA: gl.constexpr = multiplied_layout(WIDE)
        x = gl.convert_layout(x, MMA)
        if BIAS:
            bias_start, bias_columns = bias_sizes
            columns = column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, MMA))
            x = add_bias(x, bias_ptr, first * bias_columns, bias_start, columns, bias_columns)
        store_box(x, out, boxes, slot + PART % SLOTS, row, end, column, N, N, ROWS, WIDE, SLOTS)


@gluon.jit
def store_tile(acc, ptr, first_row, end, first_column, COLUMNS, total_ptr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Stores a tile of a matrix of this many columns, with the same tile of another matrix, if there is one, which may
    be the one it is stored in."""
    WIDE: gl.constexpr = BN // 4
    OUT: gl.constexpr = stored_layout(WIDE)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    column = first_column + gl.arange(0, WIDE, layout=gl.SliceLayout(0, OUT))
    # Some columns at a time: all at once would not fit the registers.
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
                # Narrowed first: half as much goes through shared memory.
                x = gl.convert_layout(part.to(ptr.dtype.element_ty), OUT)
            store_columns(x, ptr, row, end, at, COLUMNS, COLUMNS)
