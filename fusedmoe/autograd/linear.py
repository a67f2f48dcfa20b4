"""Autograd for maps that are linear and whose adjoint is at hand, as all moves of rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedmoe.kernels.derivatives import Function

Move = Callable[[Tensor], Tensor]


class _Linear(Function):
    operation, twice = "a linear map", True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Move, back: Move, name: str) -> Tensor:
        ctx.there, ctx.back, ctx.name = there, back, name
        out = there(rows)
        return out.view_as(out) if out is rows else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return linear(grad, ctx.back, ctx.there, ctx.name), None, None, None

    @classmethod
    def name_of(cls, args: Sequence[Any]) -> str:
        return str(args[3])


def linear(rows: Tensor, there: Move, back: Move, name: str) -> Tensor:
    """`there(rows)`; its backward is `back`, whose own backward is `there`. Saves nothing. `name`: in errors."""
    return _Linear.apply(rows, there, back, name)
