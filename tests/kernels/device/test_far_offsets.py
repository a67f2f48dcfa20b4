"""Elements beyond an offset of 2³¹. Only the pages in use of such tensors are ever touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.layout import offsets
from fusedmoe.kernels.triton.gather_sum import gather_rows, sum_rows
from fusedmoe.kernels.wire import define_pack_fp8, pack_fp8


@pytest.fixture(autouse=True)
def unfilled(poison: None) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False


def far_rows(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[3, dim] random rows, the third beyond 2³¹ elements."""
    stride = 2**30 + 16
    rows = torch.empty(2 * stride + dim, dtype=dtype, device=device).as_strided((3, dim), (stride, 1))
    return rows.copy_(torch.randint(-100, 100, (3, dim)).to(dtype))


def test_gather_and_sum_beyond_int32_offsets(device: torch.device) -> None:
    x = far_rows(20, torch.int8, device)
    index = torch.tensor([[2, 0], [1, 2]], device=device)
    every = offsets(torch.tensor([index.numel()], device=device))
    assert torch.equal(gather_rows(x, index.view(-1), every), x[index.view(-1)])
    assert torch.equal(sum_rows(x, index, None), x[index].sum(1).to(torch.int8))


def test_pack_beyond_int32_offsets(device: torch.device) -> None:
    x = far_rows(20, torch.float16, device)
    assert torch.equal(pack_fp8(x), define_pack_fp8(x))
