"""Experts whose parameters lie in parts, of which the kernels read tensors made for one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe import ops
from fusedmoe.kernels import operators

#: The parts, in the rows' dtype, as the w1 and w2 of `fusedmoe.ops.Weights`, contiguous; differentiable.
Join = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


def experts_in_parts(
    x_SM: Tensor, layout: ops.Layout, weight_N: Tensor | None, parts: Sequence[Tensor], join: Join, activation: str
) -> Tensor:
    """`fusedmoe.ops.experts` without biases, with weights that `join` makes of `parts`.

    What `join` makes lives while a pass runs. Saved for backward are the parts themselves, so that FSDP can free what
    it gathered, with x_SM, weight_N and the pre-activation.
    """
    y_SM: Tensor = _InParts.apply(x_SM, weight_N, layout, join, activation, *parts)
    return y_SM


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        layout: ops.Layout,
        join: Join,
        activation: str,
        *parts: Tensor,
    ) -> Tensor:
        w1, w2 = join([part.to(x_SM.dtype) for part in parts])
        y_SM, h = operators.experts(x_SM, weight_N, w1, w2, None, None, 0, *layout.tensors, activation)
        ctx.save_for_backward(h, x_SM, weight_N, *layout.tensors, *parts)
        ctx.join, ctx.activation = join, activation
        return y_SM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        h, x_SM, weight_N, *saved = ctx.saved_tensors
        layout, parts = saved[:5], [part.detach().requires_grad_() for part in saved[5:]]
        with torch.enable_grad():
            w1, w2 = ctx.join([part.to(x_SM.dtype) for part in parts])
        given = (dy_SM, h, x_SM, weight_N, w1.detach(), w2.detach(), None, None, 0, *layout, ctx.activation)
        dx_SM, dweight_N, dw1, dw2, *_ = operators.experts_backward(*given)
        dparts = torch.autograd.grad((w1, w2), parts, (dw1, dw2))
        return dx_SM, None if weight_N is None else dweight_N, None, None, None, *dparts
