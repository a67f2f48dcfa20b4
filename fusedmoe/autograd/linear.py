"""Autograd for maps that are linear and whose adjoint is at hand, as all moves of rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Move, back: Move) -> Tensor:
        ctx.there, ctx.back = there, back
        out = there(rows)
        return out.view_as(out) if out is rows else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return linear(grad, ctx.back, ctx.there), None, None


def linear(rows: Tensor, there: Move, back: Move) -> Tensor:
    """`there(rows)`; its backward is `back`, whose own backward is `there`. Saves nothing."""
    return _Linear.apply(rows, there, back)
