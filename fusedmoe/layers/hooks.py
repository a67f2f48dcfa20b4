"""Ready-made hooks."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.autograd.hooks import HookContext, Hooks

__all__ = ["HookContext", "Hooks", "WireCast"]


class WireCast(Hooks):
    """Compression: rows are dispatched and combined in a narrower dtype and widened on arrival.

    Halves these bytes for float32 rows, in forward and in backward; rounds every element that travels. What ESP moves
    inside a node stays wide, and so does what the experts compute in.

    Args:
        dtype: on the wire, e.g. torch.bfloat16.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        context.memory[self] = rows.dtype
        return rows.to(self.dtype)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return rows.to(context.memory[self])

    before_combine = before_dispatch
    after_combine = after_dispatch

    def __repr__(self) -> str:
        return f"WireCast({self.dtype})"
