"""Copies of rows by index, and sums of rows by index: a program makes a block of columns of one row of the result.

Values of pairs and of rows, one by one, have kernels of their own; so has padding that is to be zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.jit import jit

# Columns of a program: four warps move 16 bytes a thread and row in half precision.
_MOST_COLUMNS = 1024
# Values of a program where each is moved by itself.
_VALUES = 512
# Programs at the most that zero padding.
_ZEROERS = 1024


@jit
def gather_rows_kernel(x_ptr, source_ptr, kept_ptr, rows_ptr, M, stride, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + n)
    # Padding rows are written as zeros and read nothing: their mask has no columns.
    kept = tl.where(n < tl.load(kept_ptr), M, 0)
    x = tl.load(x_ptr + source * stride + column, mask=column < kept, other=0)
    tl.store(rows_ptr + n * M + column, x, mask=column < M)


@triton.jit
def sum_of_token(
    rows_ptr, row_ptr, weight_ptr, y_ptr, s, column, M, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of y[s], the sum of a token's rows."""
    total = tl.zeros((BLOCK,), dtype=TOTAL)
    # Unrolled, so that the loads of all K are under way at once; summed in their order all the same.
    for k in tl.static_range(K):
        # A dropped pair's row is -1: its mask has no columns, so that nothing is read at that address.
        row = tl.load(row_ptr + s * K + k)
        kept = row >= 0
        value = tl.load(rows_ptr + row * stride + column, mask=column < tl.where(kept, M, 0), other=0).to(TOTAL)
        if WEIGHTED:
            value *= tl.load(weight_ptr + row, mask=kept, other=0).to(TOTAL)
        total += value
    tl.store(y_ptr + s * M + column, total.to(y_ptr.dtype.element_ty), mask=column < M)


@jit
def sum_rows_kernel(
    rows_ptr, row_ptr, weight_ptr, y_ptr, M, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_of_token(rows_ptr, row_ptr, weight_ptr, y_ptr, s, column, M, stride, K, WEIGHTED, TOTAL, BLOCK)


@jit(do_not_specialize=["N"])
def take_pairs_kernel(value_ptr, pair_ptr, kept_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    pair = tl.load(pair_ptr + n, mask=inside, other=0)
    tl.store(out_ptr + n, tl.load(value_ptr + pair, mask=inside & (n < tl.load(kept_ptr)), other=0), mask=inside)


@jit(do_not_specialize=["pairs", "stride"])
def put_pairs_kernel(value_ptr, row_ptr, out_ptr, pairs, stride, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = p < pairs
    row = tl.load(row_ptr + p, mask=inside, other=-1)
    tl.store(out_ptr + p, tl.load(value_ptr + row * stride, mask=row >= 0, other=0), mask=inside)


@jit(do_not_specialize=["N", "width"])
def zero_rows_kernel(value_ptr, kept_ptr, N, width, BLOCK: tl.constexpr):
    zero = tl.zeros((BLOCK,), dtype=value_ptr.dtype.element_ty)
    kept = tl.load(kept_ptr).to(tl.int64) * width
    for first in range(kept + tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(value_ptr + i, zero, mask=i < N)


def gather_rows(x_SM: Tensor, source_N: Tensor, offsets_E1: Tensor) -> Tensor:
    """rows_NM[n] = x_SM[source_N[n]], 0 from row offsets_E1[E] on; any dtype."""
    x_SM = _rows_of_contiguous_columns(x_SM)
    rows, dim = source_N.numel(), x_SM.shape[1]
    rows_NM = x_SM.new_empty((rows, dim))
    if rows_NM.numel():
        block, warps = columns(dim)
        grid = (rows, triton.cdiv(dim, block))
        gather_rows_kernel[grid](
            x_SM, source_N, offsets_E1[-1:], rows_NM, dim, x_SM.stride(0), BLOCK=block, num_warps=warps
        )
    return rows_NM


def sum_rows(rows_NM: Tensor, row_SK: Tensor, weight_N: Tensor | None) -> Tensor:
    """y_SM[s] = Σ_k weight_N[row_SK[s, k]]·rows_NM[row_SK[s, k]], without the rows that are -1."""
    rows_NM = _rows_of_contiguous_columns(rows_NM)
    tokens, k = row_SK.shape
    dim = rows_NM.shape[1]
    y_SM = rows_NM.new_empty((tokens, dim))
    if y_SM.numel():
        block, warps = columns(dim)
        sum_rows_kernel[(tokens, triton.cdiv(dim, block))](
            rows_NM, row_SK.contiguous(), weight_N if weight_N is None else weight_N.contiguous(), y_SM,
            dim, rows_NM.stride(0),
            K=k, WEIGHTED=weight_N is not None, TOTAL=total_dtype(rows_NM.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y_SM


def _rows_of_contiguous_columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def columns(dim: int) -> tuple[int, int]:
    """Columns of a program, and its warps."""
    block = min(_MOST_COLUMNS, max(128, triton.next_power_of_2(dim)))
    return block, max(1, block // 256)


def total_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which rows are summed."""
    if dtype.is_floating_point:
        return tl.float64 if dtype == torch.float64 else tl.float32
    return tl.int64


def take_values(value_SK: Tensor, pair_N: Tensor, offsets_E1: Tensor) -> Tensor:
    """value_N[n] = the value of pair pair_N[n], 0 from row offsets_E1[E] on; any dtype of up to 8 bytes."""
    value_SK = value_SK.contiguous()
    value_N = value_SK.new_empty(pair_N.shape)
    if N := value_N.numel():
        grid = (triton.cdiv(N, _VALUES),)
        take_pairs_kernel[grid](
            _bits(value_SK), pair_N.contiguous(), offsets_E1[-1:], _bits(value_N), N, BLOCK=_VALUES, num_warps=4
        )
    return value_N


def put_values(value_N: Tensor, row_SK: Tensor) -> Tensor:
    """value_SK[s, k] = value_N[row_SK[s, k]], 0 where that is -1; any dtype of up to 8 bytes."""
    value_SK = value_N.new_empty(row_SK.shape)
    if pairs := value_SK.numel():
        grid = (triton.cdiv(pairs, _VALUES),)
        put_pairs_kernel[grid](
            _bits(value_N), row_SK.contiguous(), _bits(value_SK), pairs, value_N.stride(0), BLOCK=_VALUES, num_warps=4
        )
    return value_SK


def zero_rows(value_N: Tensor, offsets_E1: Tensor) -> Tensor:
    """Zeros of [N, ...], contiguous, from row offsets_E1[E] on, in place; any dtype of up to 8 bytes."""
    if N := value_N.numel():
        # Most often there is nothing to do, and nobody on the host knows: few programs, which go through all padding.
        grid = (min(_ZEROERS, triton.cdiv(N, _VALUES)),)
        zero_rows_kernel[grid](_bits(value_N), offsets_E1[-1:], N, N // len(value_N), BLOCK=_VALUES, num_warps=4)
    return value_N


def _bits(value: Tensor) -> Tensor:
    """Views numbers as integers of their size: a copy knows no dtype."""
    return value.view((torch.uint8, torch.int16, torch.int32, torch.int64)[value.element_size().bit_length() - 1])
