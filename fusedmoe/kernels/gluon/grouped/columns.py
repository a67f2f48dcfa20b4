"""What is done with some columns of a tile: bias, activation and stores, in rows of 16 bytes a thread."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, COLUMNS] -> its left and its right half, without leaving registers."""
    return x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()


@gluon.constexpr_function
def stored_layout(columns):
    """Of a part of this many columns, a power of two, while four warps store it."""
    vector = min(8, columns)
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


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
