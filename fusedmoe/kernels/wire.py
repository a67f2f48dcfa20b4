"""Wire formats: rows packed to fewer bytes for the way between ranks, and unpacked on arrival.

| format | a row of M elements on the wire | bytes | error of an element |
|---|---|---|---|
| bf16 | M bfloat16 | 2·M | 2⁻⁹ of itself |
| fp8 | M e4m3, then their scale, a float32: one row of uint8 | M + 4 | 2⁻⁴ of itself, or 2⁻¹⁰ scales |

An fp8 row is x / scale with scale = max|x| / 448, so that its largest element becomes the largest that e4m3 has, and
takes no precision from other rows. Rounding is to the nearest, ties to even. A row of zeros comes back as zeros; e4m3
has no infinity, so what is not finite (and takes no part in the maximum) arrives as NaN.

e4m3 is meant for gradients, too: the range that e5m2 would add is what the scale of each row gives already, and e5m2
costs a bit of precision for it (DeepSeek-V3, §3.3.2, likewise has e4m3 with fine scales everywhere).

Triton on CUDA (`triton/wire.py`), bit for bit the same. Definitions: `define_pack_fp8`,
`define_unpack_fp8`; that of bf16 is torch's own conversion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

E4M3_MAX = 448.0
# No scale is smaller, so that none is zero, and its inverse is finite.
SCALE_MIN = 2.0**-126
SCALE_BYTES = 4


def pack_bf16(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M] bfloat16."""
    if uses_triton(rows_NM):
        from fusedmoe.kernels.triton import wire

        return wire.pack_bf16(rows_NM)
    return rows_NM.to(torch.bfloat16)


def pack_fp8(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M + 4] uint8."""
    if uses_triton(rows_NM):
        from fusedmoe.kernels.triton import wire

        return wire.pack_fp8(rows_NM)
    rows = rows_NM.float()
    count, dim = rows.shape
    packed = torch.empty((count, dim + SCALE_BYTES), dtype=torch.uint8, device=rows.device)
    if packed.numel():
        magnitude = rows.abs()
        wild = ~(magnitude < math.inf)
        scale_N1 = _scales(magnitude.masked_fill_(wild, 0))
        # In the memory of the magnitudes, which are not needed again.
        code = torch.mul(rows, 1 / scale_N1, out=magnitude).to(torch.float8_e4m3fn).view(torch.uint8)
        # Torch's conversion makes infinities the largest number, or NaN, as versions have it.
        packed[:, :dim] = code.bitwise_or_(wild.view(torch.uint8).mul_(0x7F))
        packed[:, dim:] = _to_bytes(scale_N1)
    return packed


def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M + 4] uint8 -> [n, M] of `dtype`, computed in float32."""
    if uses_triton(packed):
        from fusedmoe.kernels.triton import wire

        return wire.unpack_fp8(packed, dtype)
    dim = fp8_dim(packed)
    return packed[:, :dim].view(torch.float8_e4m3fn).float().mul_(_from_bytes(packed[:, dim:])).to(dtype)


def fp8_dim(packed: Tensor) -> int:
    """M of packed rows [n, M + 4]."""
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] < SCALE_BYTES:
        raise ConfigError(f"packed rows are uint8 [n, M + 4], not {packed.dtype} {list(packed.shape)}")
    return packed.shape[1] - SCALE_BYTES


def define_pack_fp8(rows_NM: Tensor) -> Tensor:
    """Defines what `pack_fp8` must return: the e4m3 number nearest to each element, of two as near the even one."""
    rows = rows_NM.float()
    magnitude = rows.abs()
    finite = magnitude.isfinite()
    scale_N1 = _scales(magnitude.where(finite, 0))
    scaled = magnitude * (1 / scale_N1)
    numbers = torch.arange(127, dtype=torch.uint8, device=rows.device).view(torch.float8_e4m3fn).double()
    distance = (scaled.double()[..., None] - numbers).abs()
    nearest = distance.where(finite[..., None], 0).amin(-1, keepdim=True)
    even_first = torch.cat([torch.arange(0, 127, 2, device="cpu"), torch.arange(1, 127, 2, device="cpu")]).to(
        rows.device
    )
    code = even_first[(distance == nearest)[..., even_first].byte().argmax(-1)]
    code = torch.where(finite, code, 127) + 128 * rows.signbit()
    return torch.cat([code.to(torch.uint8), _to_bytes(scale_N1)], 1)


def define_unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Defines what `unpack_fp8` must return, from the meaning of the bits."""
    code = packed[:, :-SCALE_BYTES].int()
    exponent, mantissa = code // 8 % 16, code % 8
    number = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    number = torch.where(code % 128 == 127, math.nan, number) * torch.where(code < 128, 1.0, -1.0)
    return (number.float() * _from_bytes(packed[:, -SCALE_BYTES:])).to(dtype)


def _scales(magnitude_NM: Tensor) -> Tensor:
    """[n, 1]; a row without elements has a scale, too."""
    count, dim = magnitude_NM.shape
    largest = magnitude_NM.amax(1, keepdim=True) if dim else magnitude_NM.new_zeros((count, 1))
    # By a tensor: where one side is a number, torch multiplies by its reciprocal on CUDA, which rounds otherwise.
    return (largest / torch.full_like(largest, E4M3_MAX)).clamp_(min=SCALE_MIN)


def _to_bytes(scale_N1: Tensor) -> Tensor:
    """[n, 1] float32 -> its [n, 4] bytes."""
    scale_N4 = torch.empty((scale_N1.shape[0], SCALE_BYTES), dtype=torch.uint8, device=scale_N1.device)
    scale_N4.view(torch.float32).copy_(scale_N1)
    return scale_N4


def _from_bytes(scale_N4: Tensor) -> Tensor:
    """The inverse. Copies: where the bytes lie in packed rows they may be aligned to nothing."""
    return torch.empty(scale_N4.shape, dtype=torch.uint8, device=scale_N4.device).copy_(scale_N4).view(torch.float32)
