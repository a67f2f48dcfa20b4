"""The smallest kernel, as an example and as a check that kernels run at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedmoe.kernels.backend import uses_triton


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def test_minimal_kernel_runs(device: torch.device) -> None:
    x = torch.randn(37, device=device)
    y = torch.full_like(x, float("nan"))
    assert uses_triton(x)
    double_kernel[(3,)](x, y, 37, BLOCK=16)
    assert torch.equal(y, x * 2)
