"""Row gathers and weighted row sums; a program computes a block of columns of one output row.

Arguments are fields of the layout (`kernels/gather_sum.py`). Separate kernels move single values of pairs and rows, of
up to 8 bytes, and zero padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.jit import jit

# Columns per program: four warps move 16 bytes per thread and row in half precision.
_MAX_COLUMNS = 1024
# Values per program of the value kernels.
_VALUES = 512
_ZERO_PROGRAMS = 1024


@jit
def gather_rows_kernel(x_ptr, source_ptr, kept_ptr, rows_ptr, M, stride, BLOCK: tl.constexpr):
    """Write row source[n] of x to row n of `rows_ptr`, and zeros to rows from `kept` on (padding)."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + n)
    kept = tl.where(n < tl.load(kept_ptr), M, 0)
    x = tl.load(x_ptr + source * stride + column, mask=column < kept, other=0)
    tl.store(rows_ptr + n * M + column, x, mask=column < M)


@triton.jit
def sum_of_token(
    rows_ptr, row_ptr, weight_ptr, y_ptr, s, column, M, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), dtype=TOTAL)
    # Unrolled, so the loads of all K rows are in flight at once.
    for k in tl.static_range(K):
        # The address of a dropped pair (row -1) is masked.
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
    x_SM = _with_contiguous_rows(x_SM)
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
    rows_NM = _with_contiguous_rows(rows_NM)
    tokens, k = row_SK.shape
    dim = rows_NM.shape[1]
    y_SM = rows_NM.new_empty((tokens, dim))
    if y_SM.numel():
        block, warps = columns(dim)
        sum_rows_kernel[(tokens, triton.cdiv(dim, block))](
            rows_NM, row_SK.contiguous(), weight_N if weight_N is None else weight_N.contiguous(), y_SM,
            dim, rows_NM.stride(0),
            K=k, WEIGHTED=weight_N is not None, TOTAL=accumulation_dtype(rows_NM.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y_SM


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def columns(dim: int) -> tuple[int, int]:
    block = min(_MAX_COLUMNS, max(128, triton.next_power_of_2(dim)))
    return block, max(1, block // 256)


def accumulation_dtype(dtype: torch.dtype) -> tl.dtype:
    if dtype.is_floating_point:
        return tl.float64 if dtype == torch.float64 else tl.float32
    return tl.int64


def take_values(value_SK: Tensor, pair_N: Tensor, offsets_E1: Tensor) -> Tensor:
    value_SK = value_SK.contiguous()
    value_N = value_SK.new_empty(pair_N.shape)
    if N := value_N.numel():
        grid = (triton.cdiv(N, _VALUES),)
        take_pairs_kernel[grid](
            _bits(value_SK), pair_N.contiguous(), offsets_E1[-1:], _bits(value_N), N, BLOCK=_VALUES, num_warps=4
        )
    return value_N


def put_values(value_N: Tensor, row_SK: Tensor) -> Tensor:
    value_SK = value_N.new_empty(row_SK.shape)
    if pairs := value_SK.numel():
        grid = (triton.cdiv(pairs, _VALUES),)
        put_pairs_kernel[grid](
            _bits(value_N), row_SK.contiguous(), _bits(value_SK), pairs, value_N.stride(0), BLOCK=_VALUES, num_warps=4
        )
    return value_SK


def zero_rows(value_N: Tensor, offsets_E1: Tensor) -> Tensor:
    if N := value_N.numel():
        # Usually there is no padding, but the host cannot know.
        grid = (min(_ZERO_PROGRAMS, triton.cdiv(N, _VALUES)),)
        zero_rows_kernel[grid](_bits(value_N), offsets_E1[-1:], N, N // len(value_N), BLOCK=_VALUES, num_warps=4)
    return value_N


def _bits(value: Tensor) -> Tensor:
    """View as integers of the same size: a copy does not depend on the dtype."""
    return value.view((torch.uint8, torch.int16, torch.int32, torch.int64)[value.element_size().bit_length() - 1])
