"""Ready-made hooks, and the outer seams of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.hooks import HookContext, Hooks, run_hooks
from fusedmoe.autograd.wire_formats import pack_fp8, unpack_fp8
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import Function

__all__ = ["HookContext", "Hooks", "WireCast", "WireFp8"]


class WireCast(Hooks):
    """Compression: tokens are dispatched, and their sums combined, in a narrower dtype and widened on arrival.

    Halves these bytes for float32 tokens, in forward and in backward; rounds every element that travels, a token's
    results on a rank once, as their sum. Router weights, which travel beside, stay as they are. What ESP moves
    inside a node stays wide, and so does what the experts compute in.

    Args:
        dtype: on the wire, e.g. torch.bfloat16.
    Raises:
        ConfigError: a dtype that is not of floating-point numbers.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if not _is_floating(dtype):
            raise ConfigError(f"WireCast: rows cannot travel as {dtype!r}; give a floating-point dtype, torch.bfloat16")
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


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


class WireFp8(Hooks):
    """Compression: tokens and their sums travel between ranks as fp8, one byte an element and a scale for each row.

    A quarter of the bytes of dispatch and combine for float32 rows, half for bfloat16, in forward and in backward. An
    element that travels is off by 2⁻⁴ of itself at most, or by 2⁻¹⁸ of the largest of its row. The format is
    e4m3 both ways: with a scale for each row gradients do not need the range of e5m2. What is not finite arrives as
    NaN. The experts compute in the rows' own dtype. The bytes: `fusedmoe.kernels.wire`.
    """

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        context.memory[self] = rows.dtype
        return pack_fp8(rows)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return unpack_fp8(rows, context.memory[self])

    before_combine = before_dispatch
    after_combine = after_dispatch

    def __repr__(self) -> str:
        return "WireFp8()"


def enter(hooks: Sequence[Hooks], x: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Returns what a layer gets of its input. The gradient of the input passes the hooks at the layer's end."""
    if not hooks:
        return x
    x = _tap(hooks, x, "before_moe_end", chunk, chunks)
    return run_hooks(hooks, "before_moe_start", x, HookContext("forward", chunk, chunks))


def leave(hooks: Sequence[Hooks], y: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Returns what a layer gives of its output. The gradient of the output passes the hooks at the layer's start."""
    if not hooks:
        return y
    y = run_hooks(hooks, "before_moe_end", y, HookContext("forward", chunk, chunks))
    return _tap(hooks, y, "before_moe_start", chunk, chunks)


def _tap(hooks: Sequence[Hooks], tensor: Tensor, seam: str, chunk: int, chunks: int) -> Tensor:
    """The identity, whose backward passes the gradient through the hooks at `seam`."""
    return _Tap.apply(tensor, lambda grad: run_hooks(hooks, seam, grad, HookContext("backward", chunk, chunks)))


class _Tap(Function):
    operation, twice = "hooks at a layer's start and end", True  # autograd sees what they make of a gradient, too

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.passed = passed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.passed(gradients[0]), None
