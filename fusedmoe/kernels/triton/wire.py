"""Pack and unpack rows for the wire; one program per row and group of its columns.

Rounds with integer operations on the bits, equal on every GPU, including GPUs without fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.wire import BLOCK, E4M3_MAX, MAX_MAGNITUDE, SCALE_MIN, fp8_dim, num_blocks, packed_width

# Most columns per program.
_MAX_COLUMNS = 2048


@triton.jit
def _bf16_bits(x):
    """Round float32 to the bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _e4m3_bits(x, inverse):
    """Scale float32 and round to the bits of the nearest e4m3, ties to even; non-finite becomes NaN."""
    y = x * inverse
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keeps three mantissa bits; the exponent bias changes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # e4m3 below 2^-6 is a multiple of 2^-9, the float32 spacing at 2^14: adding 2^14 rounds.
    tiny = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, tiny, normal)
    code = tl.where(tl.abs(x) < float("inf"), code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def pack_fp8_kernel(
    x_ptr, out_ptr, M, blocks, stride,
    LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr, MOST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + n * stride + column, mask=column < M, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    largest = tl.minimum(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), MOST)
    # Correctly rounded division: an approximate reciprocal could change the code.
    scale = tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE)
    row_ptr = out_ptr + n * (M + 4 * blocks)
    tl.store(row_ptr + column, _e4m3_bits(x, tl.div_rn(1.0, scale)[:, None]), mask=column < M)
    # A 4-byte store would be misaligned unless M is a multiple of four.
    byte = tl.arange(0, 4)[None, :]
    bits = (scale.to(tl.int32, bitcast=True)[:, None] >> (8 * byte)) & 0xFF
    tl.store(row_ptr + M + 4 * block[:, None] + byte, bits.to(tl.uint8), mask=block[:, None] < blocks)


@jit
def unpack_fp8_kernel(
    packed_ptr, out_ptr, M, blocks, AS_BF16: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row_ptr = packed_ptr + n * (M + 4 * blocks)
    byte = tl.arange(0, 4)[None, :]
    bits = tl.load(row_ptr + M + 4 * block[:, None] + byte, mask=block[:, None] < blocks, other=0).to(tl.int32)
    scale = tl.sum(bits << (8 * byte), 1).to(tl.float32, bitcast=True)
    code = tl.load(row_ptr + column, mask=column < M, other=0).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    x = tl.where(code < 128, number, -number) * scale[:, None]
    value = _bf16_bits(x) if AS_BF16 else x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n * M + column, value, mask=column < M)


def pack_fp8(rows_NM: Tensor) -> Tensor:
    rows_NM = rows_NM if rows_NM.stride(1) == 1 else rows_NM.contiguous()
    rows, dim = rows_NM.shape
    packed = rows_NM.new_empty((rows, packed_width(dim)), dtype=torch.uint8)
    if packed.numel():
        blocks, constants, options = num_blocks(dim), pack_constants(dim), launch_options(dim)
        grid = (rows, triton.cdiv(dim, columns(dim)))
        pack_fp8_kernel[grid](rows_NM, packed, dim, blocks, rows_NM.stride(0), **constants, **options)
    return packed


def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    packed = packed.contiguous()
    rows, dim = packed.shape[0], fp8_dim(packed)
    out_NM = packed.new_empty((rows, dim), dtype=dtype)
    if out_NM.numel():
        half = dtype == torch.bfloat16
        written = out_NM.view(torch.int16) if half else out_NM
        grid = (rows, triton.cdiv(dim, columns(dim)))
        unpack_fp8_kernel[grid](
            packed, written, dim, num_blocks(dim), AS_BF16=half, **block_constants(dim), **launch_options(dim)
        )
    return out_NM


def columns(dim: int) -> int:
    return min(_MAX_COLUMNS, max(BLOCK, triton.next_power_of_2(dim)))


def pack_constants(dim: int) -> dict[str, float]:
    return {"LARGEST": E4M3_MAX, "SMALLEST_SCALE": SCALE_MIN, "MOST": MAX_MAGNITUDE, **block_constants(dim)}


def block_constants(dim: int) -> dict[str, int]:
    return {"BLOCKS": columns(dim) // BLOCK, "BLOCK": BLOCK}


def launch_options(dim: int) -> dict[str, int]:
    """Disable FMA contraction, which would round differently from the reference."""
    return {"num_warps": max(1, min(8, columns(dim) // 256)), "enable_fp_fusion": False}
