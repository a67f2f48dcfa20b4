"""Wire formats: pack rows to fewer bytes for communication, and unpack them on arrival.

| format | a row of M elements on the wire | bytes | error of an element |
|---|---|---|---|
| fp8 | M e4m3, then their float32 scale: one row of uint8 | M + 4 | relative 2⁻⁴, or 2⁻¹⁰ scales |

An fp8 row is x / scale with scale = max|x| / 448, the e4m3 maximum. Rounds to nearest even. Non-finite elements are
excluded from the maximum and unpack as NaN. Gradients use e4m3, too, as in DeepSeek-V3 (§3.3.2): the row scale provides
the range of e5m2 at one more bit of precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

E4M3_MAX = 448.0
# Keeps a scale nonzero and its inverse finite.
SCALE_MIN = 2.0**-126
SCALE_BYTES = 4


def pack_fp8(rows_NM: Tensor) -> Tensor:
    """Quantize each row to float8_e4m3fn with its own scale: [n, M] floating point -> [n, M + 4] uint8."""
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
        code = torch.mul(rows, 1 / scale_N1, out=magnitude).to(torch.float8_e4m3fn).view(torch.uint8)
        # Torch converts infinities to the largest number or to NaN, depending on its version.
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
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] < SCALE_BYTES:
        raise ConfigError(f"packed rows must be uint8 [n, M + 4], got {packed.dtype} {list(packed.shape)}")
    return packed.shape[1] - SCALE_BYTES


def define_pack_fp8(rows_NM: Tensor) -> Tensor:
    """Round scaled elements to e4m3, ties to even, and append the scale of each row."""
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
    code = packed[:, :-SCALE_BYTES].int()
    exponent, mantissa = code // 8 % 16, code % 8
    number = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    number = torch.where(code % 128 == 127, math.nan, number) * torch.where(code < 128, 1.0, -1.0)
    return (number.float() * _from_bytes(packed[:, -SCALE_BYTES:])).to(dtype)


def _scales(magnitude_NM: Tensor) -> Tensor:
    count, dim = magnitude_NM.shape
    largest = magnitude_NM.amax(1, keepdim=True) if dim else magnitude_NM.new_zeros((count, 1))
    # torch on CUDA multiplies by the reciprocal of a Python scalar, which rounds differently.
    return (largest / torch.full_like(largest, E4M3_MAX)).clamp_(min=SCALE_MIN)


def _to_bytes(scale_N1: Tensor) -> Tensor:
    scale_N4 = torch.empty((scale_N1.shape[0], SCALE_BYTES), dtype=torch.uint8, device=scale_N1.device)
    scale_N4.view(torch.float32).copy_(scale_N1)
    return scale_N4


def _from_bytes(scale_N4: Tensor) -> Tensor:
    # Scales inside packed rows may be unaligned.
    return torch.empty(scale_N4.shape, dtype=torch.uint8, device=scale_N4.device).copy_(scale_N4).view(torch.float32)
