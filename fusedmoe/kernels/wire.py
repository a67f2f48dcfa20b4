"""Wire formats: pack rows to fewer bytes for communication, and unpack them on arrival.

| format | a row of M elements on the wire | bytes | error of an element |
|---|---|---|---|
| fp8 | M e4m3, then a float32 scale per 128 columns, all as uint8 | M + 4·⌈M/128⌉ | relative 2⁻⁴, or 2⁻¹⁰ scales |

The last block of an fp8 row may be shorter. A block is x / scale with scale = max|x| / 448, the e4m3 maximum, but at
least 2⁻¹²⁶. Scales that are powers of two would make the multiplication exact and fit one byte, but they round the
largest element: the root-mean-square error of normal random numbers is then 2.65 % instead of 2.57 %, and that of a
SwiGLU layer's output 4.0 % instead of 3.8 %.

Rounds to nearest even. Elements that are not finite in float32 are excluded from the maximum and unpack as NaN.
Gradients use e4m3, too, as in DeepSeek-V3 (§3.3.2): the scales provide the range of e5m2 at one more bit of precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

#: Columns that share a scale.
BLOCK = 128
E4M3_MAX = 448.0
# Keeps a scale nonzero and its inverse finite.
SCALE_MIN = 2.0**-126
# The maximum is at most this number: 448 times its scale may round up, and float32 ends with (2 - 2⁻²³)·2¹²⁷.
MAX_MAGNITUDE = (2 - 2.0**-21) * 2.0**127
SCALE_BYTES = 4


def pack_fp8(rows_NM: Tensor) -> Tensor:
    """Quantize to float8_e4m3fn with a scale per 128 columns: [n, M] floating point -> [n, M + 4·⌈M/128⌉] uint8."""
    if uses_triton(rows_NM):
        from fusedmoe.kernels.triton import wire

        return wire.pack_fp8(rows_NM)
    rows = rows_NM.float()
    count, dim = rows.shape
    packed = torch.empty((count, packed_width(dim)), dtype=torch.uint8, device=rows.device)
    scale_NB = rows.new_empty((count, num_blocks(dim)))
    for rows_NBC, code_NBC, scales in zip(_blocks(rows), _blocks(packed[:, :dim]), _scales(scale_NB, dim), strict=True):
        magnitude = rows_NBC.abs()
        is_nonfinite = ~(magnitude < math.inf)
        scales.copy_(_scale_of(magnitude.masked_fill_(is_nonfinite, 0).amax(2)))
        code = torch.mul(rows_NBC, 1 / scales[..., None], out=magnitude).to(torch.float8_e4m3fn).view(torch.uint8)
        # Torch converts infinities to the largest number or to NaN, depending on its version.
        code_NBC.copy_(code.bitwise_or_(is_nonfinite.view(torch.uint8).mul_(0x7F)))
    packed[:, dim:] = scale_NB.view(torch.uint8)
    return packed


def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M + 4·⌈M/128⌉] uint8 -> [n, M] of `dtype`, computed in float32."""
    if uses_triton(packed):
        from fusedmoe.kernels.triton import wire

        return wire.unpack_fp8(packed, dtype)
    dim = fp8_dim(packed)
    rows = packed[:, :dim].view(torch.float8_e4m3fn).float()
    if dim:
        for rows_NBC, scales in zip(_blocks(rows), _scales(_read_scales(packed), dim), strict=True):
            rows_NBC.mul_(scales[..., None])
    return rows.to(dtype)


def num_blocks(dim: int) -> int:
    return -(-dim // BLOCK)


def packed_width(dim: int) -> int:
    """Return the bytes of an fp8 row of `dim` elements, scales included."""
    return dim + SCALE_BYTES * num_blocks(dim)


def fp8_dim(packed: Tensor) -> int:
    """Return the number of elements of packed fp8 rows. Raises `ConfigError` for other tensors."""
    width = packed.shape[1] if packed.dim() == 2 and packed.dtype == torch.uint8 else -1
    dim = width - SCALE_BYTES * -(-width // (BLOCK + SCALE_BYTES))
    if width < 0 or packed_width(dim) != width:
        raise ConfigError(f"packed rows must be uint8 [n, M + 4·⌈M/128⌉], got {packed.dtype} {list(packed.shape)}")
    return dim


def define_pack_fp8(rows_NM: Tensor) -> Tensor:
    """Round scaled elements to e4m3, ties to even, and append the scale of each block."""
    numbers = torch.arange(127, dtype=torch.uint8, device=rows_NM.device).view(torch.float8_e4m3fn).double()
    even_first = torch.cat([torch.arange(0, 127, 2, device="cpu"), torch.arange(1, 127, 2, device="cpu")])
    codes, scales = [], []
    for block_NC in rows_NM.float().split(BLOCK, 1) if rows_NM.shape[1] else ():
        magnitude = block_NC.abs()
        finite = magnitude.isfinite()
        scale_N1 = _scale_of(magnitude.where(finite, 0).amax(1, keepdim=True))
        distance = ((magnitude * (1 / scale_N1)).double()[..., None] - numbers).abs()
        nearest = distance.where(finite[..., None], 0).amin(-1, keepdim=True)
        code = even_first.to(rows_NM.device)[(distance == nearest)[..., even_first].byte().argmax(-1)]
        codes.append((torch.where(finite, code, 127) + 128 * block_NC.signbit()).to(torch.uint8))
        scales.append(scale_N1.view(torch.uint8))
    return torch.cat(codes + scales, 1) if codes else rows_NM.to(torch.uint8)


def define_unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    dim = fp8_dim(packed)
    if not dim:
        return packed.to(dtype)
    code = packed[:, :dim].int()
    exponent, mantissa = code // 8 % 16, code % 8
    number = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    number = torch.where(code % 128 == 127, math.nan, number) * torch.where(code < 128, 1.0, -1.0)
    return (number.float() * _read_scales(packed).repeat_interleave(BLOCK, 1)[:, :dim]).to(dtype)


def _scale_of(largest: Tensor) -> Tensor:
    # torch on CUDA multiplies by the reciprocal of a Python scalar, which rounds differently.
    return (largest.clamp(max=MAX_MAGNITUDE) / torch.full_like(largest, E4M3_MAX)).clamp_(min=SCALE_MIN)


def _read_scales(packed: Tensor) -> Tensor:
    # A copy: scales inside packed rows may be unaligned.
    return packed[:, fp8_dim(packed) :].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _blocks(rows_NM: Tensor) -> Iterator[Tensor]:
    """Yield views [n, blocks, columns] of the whole blocks of 128 columns, and of the shorter last block."""
    whole = rows_NM.shape[1] // BLOCK
    if whole:
        yield rows_NM[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
    if rows_NM.shape[1] % BLOCK:
        yield rows_NM[:, whole * BLOCK :].unsqueeze(1)


def _scales(scale_NB: Tensor, dim: int) -> Iterator[Tensor]:
    """Yield the scales of each view of `_blocks`."""
    whole = dim // BLOCK
    if whole:
        yield scale_NB[:, :whole]
    if dim % BLOCK:
        yield scale_NB[:, whole:]
