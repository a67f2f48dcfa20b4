"""Spans of both passes: a region of the forward pass, and of the backward pass through the same operations.

Autograd runs the backward of a region on its own, so the region puts a mark where its input enters and one where its
result leaves; going backward, the second mark opens the span and the first one closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd import Function

from fusedmoe.runtime.recorder import Recorder


def recorded(
    recorder: Recorder | None,
    operation: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    kind: str,
    layer: int | None = None,
) -> Tensor:
    """`operation(x)`, as a span of the forward and one of the backward pass when there is a recorder."""
    if recorder is None:
        return operation(x)
    back = recorder.span(kind, kind=kind, layer=layer, phase="backward")
    with recorder.span(kind, kind=kind, layer=layer, phase="forward"):
        y = operation(_Mark.apply(x, lambda: _close(back)))
        return _Mark.apply(y, lambda: _open(back))


def _open(span: AbstractContextManager[None]) -> None:
    span.__enter__()


def _close(span: AbstractContextManager[None]) -> None:
    span.__exit__(None, None, None)


class _Mark(Function):
    """The identity; calls `action` when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return gradients[0], None
