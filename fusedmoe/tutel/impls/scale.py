"""Rows times a factor each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, weight_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NM, weight_N)
        return rows_NM.to(weight_N.dtype) * weight_N[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, Tensor]:
        rows_NM, weight_N = ctx.saved_tensors
        # One dot product a row, as one operation: nothing of the rows' size is made for it.
        dweight_N = torch.bmm(grad_NM[:, None], rows_NM.to(weight_N.dtype)[:, :, None])[:, 0, 0]
        return (grad_NM * weight_N[:, None]).to(rows_NM.dtype), dweight_N


def scaled(rows_NM: Tensor, weight_N: Tensor) -> Tensor:
    """weight_N[n] · rows_NM[n] in the weights' dtype, which is at least as wide. Saves both as they are."""
    out: Tensor = _Scaled.apply(rows_NM, weight_N)
    return out
