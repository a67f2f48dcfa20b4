"""PyTorch's grouped product, `torch._grouped_mm`, with other PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import Case
from bench.gpu.layer import Layer, Unavailable, leaf

NAME = "torch._grouped_mm"


def make(case: Case) -> Layer:
    """Sort, copy rows, product, silu·mul, product, weighted sum; backward by autograd.

    Known faults on GPUs are avoided: there are no rows after the last offset, which it leaves unwritten, and experts
    without rows (a backward that hangs, PyTorch issue 152668; nonzero gradients, 172439) make it unavailable.
    """
    if not hasattr(torch, "_grouped_mm"):
        raise Unavailable(f"not in PyTorch {torch.__version__}")
    shape, device = case.shape, case.x_SM.device
    if case.x_SM.is_cuda and int(torch.bincount(case.expert_SK.flatten(), minlength=shape.E).min()) == 0:
        raise Unavailable("an expert has no rows: its backward may hang")
    leaves = leaf(case.x_SM), leaf(case.weight_SK), leaf(case.w1), leaf(case.w2)
    x_SM, weight_SK, w1, w2 = leaves

    def forward() -> Tensor:
        expert_N, pair_N = case.expert_SK.flatten().sort(stable=True)
        end_E = torch.searchsorted(expert_N, torch.arange(shape.E, device=device), right=True).int()
        row_N = torch.empty_like(pair_N).scatter_(0, pair_N, torch.arange(shape.rows, device=device))
        x_NM = x_SM.index_select(0, pair_N // shape.K)
        h_NH = torch._grouped_mm(x_NM, w1.view(shape.E, -1, shape.M).transpose(1, 2), offs=end_E)
        g_NH, u_NH = h_NH.chunk(2, -1)
        y_NM = torch._grouped_mm(functional.silu(g_NH) * u_NH, w2.transpose(1, 2), offs=end_E)
        y_SKM = y_NM.index_select(0, row_N).view(shape.S, shape.K, shape.M)
        return (y_SKM * weight_SK.to(y_SKM.dtype)[:, :, None]).sum(1)

    return Layer(NAME, torch.__version__, forward, leaves)
