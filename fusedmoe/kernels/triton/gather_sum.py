"""Copies of rows by index, and sums of rows by index: a program makes a block of columns of one row of the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.jit import jit

# Columns of a program: four warps move 16 bytes a thread and row in half precision.
_MOST_COLUMNS = 1024


@jit
def gather_rows_kernel(x_ptr, source_ptr, kept_ptr, rows_ptr, M, stride, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + n)
    # Padding rows are written as zeros and read nothing: their mask has no columns.
    kept = tl.where(n < tl.load(kept_ptr), M, 0)
    x = tl.load(x_ptr + source * stride + column, mask=column < kept, other=0)
    tl.store(rows_ptr + n * M + column, x, mask=column < M)


@jit
def sum_rows_kernel(
    rows_ptr, row_ptr, weight_ptr, y_ptr, M, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
