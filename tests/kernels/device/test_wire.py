from __future__ import annotations

import pytest
import torch

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.wire import pack_fp8, unpack_fp8
from tests.kernels.wire_cases import SHAPES, check_fp8, rows_of_many_kinds, rows_of_shape


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # float64 to float32, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_pack_rows_of_many_kinds(dtype: torch.dtype, device: torch.device) -> None:
    rows_NM = rows_of_many_kinds(dtype).to(device)
    if INTERPRET and dtype == torch.bfloat16:  # the interpreter reads bf16 subnormals incorrectly
        rows_NM = torch.where(rows_NM.abs() < torch.finfo(dtype).tiny, 0, rows_NM)
    check_fp8(rows_NM)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_rows_of_any_shape(shape: tuple[int, int], device: torch.device) -> None:
    check_fp8(rows_of_shape(shape).to(device))


def test_pack_strided_rows(device: torch.device) -> None:
    rows_NM = torch.randn(2 * 10, 90, device=device)
    for view in (rows_NM[::2, 20:70], rows_NM[:, ::3], rows_NM.t()):
        check_fp8(view)
    packed = pack_fp8(torch.randn(20, 96, device=device))
    assert torch.equal(unpack_fp8(packed[::2], torch.float32), unpack_fp8(packed, torch.float32)[::2])
