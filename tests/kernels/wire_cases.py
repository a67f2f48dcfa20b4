"""Rows with difficult values for a wire format, and requirements on packing them, in plain torch and in kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedmoe.kernels.wire import (
    define_pack_fp8,
    define_unpack_fp8,
    fp8_dim,
    pack_fp8,
    packed_width,
    unpack_fp8,
)

SHAPES = [(0, 8), (1, 1), (37, 100), (4, 128), (4, 129), (5, 512), (3, 5000), (3, 0)]


def rows_of_shape(shape: tuple[int, int]) -> Tensor:
    rows = torch.randn(shape)
    rows[:, -1:] *= 100
    return rows


def rows_of_many_kinds(dtype: torch.dtype) -> Tensor:
    """[n, 131]"""
    rows = torch.randn(12, 131)
    rows[1] = 0
    rows[2] *= torch.logspace(-30, 30, 131, 2)  # exceeds the range of e4m3
    rows[3] *= 2.0**-130  # the smallest numbers
    rows[4] *= 1e37
    rows[5, 7] = math.nan
    rows[6, 3], rows[6, 9] = math.inf, -math.inf
    rows[7] = math.nan
    rows[7, ::2] = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)  # NaN with all bits set
    rows[8] = -0.0
    # Every midpoint between two neighbours of e4m3, at scale 1, of either sign, and every e4m3 number.
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows[9:12] = 448
    rows[9, :126] = (numbers[1:] + numbers[:-1]) / 2
    rows[10] = -rows[9]
    rows[11, :127] = numbers
    return rows.to(dtype)


def check_fp8(rows_NM: Tensor) -> None:
    """Check the bits in both directions, and the error bounds."""
    packed = pack_fp8(rows_NM)
    assert packed.dtype == torch.uint8 and packed.shape == (rows_NM.shape[0], packed_width(rows_NM.shape[1]))
    assert torch.equal(_unsigned_nan(packed), _unsigned_nan(define_pack_fp8(rows_NM)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got, expected = unpack_fp8(packed, dtype), define_unpack_fp8(packed, dtype)
        assert got.dtype == dtype and got.shape == rows_NM.shape
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    x, y = rows_NM.float().double(), unpack_fp8(packed, torch.float32).double()
    finite = x.isfinite()
    assert torch.equal(y.isnan(), ~finite)
    for block, received in zip(x.where(finite, 0).split(128, 1), y.where(finite, 0).split(128, 1), strict=True):
        if block.numel():
            scale_N1 = block.abs().amax(1, keepdim=True) / 448
            bound = torch.maximum(block.abs() * 2.0**-4, scale_N1 * 2.0**-10).clamp(min=2.0**-135) * (1 + 1e-6)
            assert ((received - block).abs() <= bound).all()


def _unsigned_nan(packed: Tensor) -> Tensor:
    """Clear the sign of NaN, which a GPU does not keep. The scales' bytes stay."""
    packed = packed.clone()
    codes = packed[:, : fp8_dim(packed)]
    codes[codes == 0xFF] = 0x7F
    return packed
