"""Packing rows to float8 and back: shapes, strides, and the definition computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.wire import define_pack_fp8, define_unpack_fp8, pack_fp8, packed_width, unpack_fp8
from tests.kernels.wire_cases import SHAPES, check_fp8, rows_of_many_kinds, rows_of_shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_pack_rows_of_many_kinds(dtype: torch.dtype) -> None:
    check_fp8(rows_of_many_kinds(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_rows_of_any_shape(shape: tuple[int, int]) -> None:
    check_fp8(rows_of_shape(shape))


def test_pack_strided_rows() -> None:
    rows_NM = torch.randn(2 * 10, 90)
    for view in (rows_NM[::2, 20:70], rows_NM[:, ::3], rows_NM.t()):
        check_fp8(view)
    packed = pack_fp8(torch.randn(20, 96))
    assert torch.equal(unpack_fp8(packed[::2], torch.float32), unpack_fp8(packed, torch.float32)[::2])


def test_fp8_definition_equals_hand_computation() -> None:
    # Scale 1. Neighbours are 2 apart between 16 and 32, and 2⁻⁹ apart below 2⁻⁶; ties round to even.
    rows_NM = torch.tensor([[448.0, -448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 0.0, math.nan, -math.inf]])
    packed = define_pack_fp8(rows_NM)
    assert packed[0, :7].tolist() == [0x7E, 0xFE, 0x58, 0x5A, 0x00, 0x02, 0x00]
    assert packed[0, 7:].tolist() == [0x7F, 0xFF, 0, 0, 0x80, 0x3F]  # 1.0 in float32
    back = define_unpack_fp8(packed, torch.float64)
    assert back[0, :7].tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8, 0.0] and back[0, 7:].isnan().all()


def test_each_block_of_columns_has_its_own_scale() -> None:
    largest = torch.tensor([0.0, 1.0, 448.0, 449.0, 2.0**-126, 1.9 * 2.0**-149, torch.finfo(torch.float32).max])
    rows_NM = torch.zeros(1, 128 * 6 + 5)
    rows_NM[0, 3::128] = largest
    packed = pack_fp8(rows_NM)
    assert packed.shape == (1, 128 * 6 + 5 + 4 * 7) and torch.equal(packed, define_pack_fp8(rows_NM))
    scales = packed[0, -28:].clone().view(torch.float32)
    assert torch.equal(scales, torch.clamp(largest.clamp(max=(2 - 2.0**-21) * 2.0**127) / 448, min=2.0**-126))
    received = unpack_fp8(packed, torch.float64)[0, 3::128]
    # A block's largest element is exact up to the rounding of its scale; finite numbers stay finite.
    torch.testing.assert_close(received, largest.double(), rtol=2.0**-20, atol=2.0**-135)
    for dtype in (torch.float16, torch.bfloat16):
        most = torch.full((1, 1), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(unpack_fp8(pack_fp8(most), dtype), most)


def test_fp8_rows_have_at_most_53_percent_of_the_bytes_of_bfloat16() -> None:
    assert all(packed_width(dim) <= 0.53 * 2 * dim for dim in (128, 200, 1024, 4096, 7168, 7170))
    assert packed_width(4096) == 4096 * (1 + 4 / 128)


def test_unpack_rejects_unpacked_rows() -> None:
    for wrong in (
        torch.zeros(3, 8),
        torch.zeros(3, 4, dtype=torch.uint8),
        torch.zeros(3, 134, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8),
    ):
        with pytest.raises(ConfigError, match="M \\+ 4·⌈M/128⌉"):
            unpack_fp8(wrong, torch.float32)
