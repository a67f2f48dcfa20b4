"""Experts whose parameters lie in parts: the kernels read tensors that live for one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedmoe.kernels import operators
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout


class WeightParts(NamedTuple):
    """Functions that make weights of parts.

    Attributes:
        join: the parts, in the dtype of the rows, as w1 and w2 of `fusedmoe.ops.Weights`, contiguous.
        split: its inverse, for their gradients.
    """

    join: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    split: Callable[[Tensor, Tensor], Sequence[Tensor]]


def experts_in_parts(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    parts: Sequence[Tensor],
    how: WeightParts,
    activation: str,
) -> Tensor:
    """Computes `fusedmoe.ops.experts` without biases, with weights that lie in parts.

    The weights live while a pass runs.

    Args:
        x_SM, layout, weight_N, activation: as for `fusedmoe.ops.experts`.
        parts: parameters, in the order in which `how` joins them; each gets a gradient in its own dtype.
        how: what joins parts to weights, and splits the weights' gradients.
    Saves for backward:
        The parts themselves, so that FSDP can free what it gathered, with x_SM, weight_N and the pre-activation.
    """
    y_SM: Tensor = _InParts.apply(x_SM, weight_N, layout, how, activation, *parts)
    return y_SM


class _InParts(Function):
    operation = "ops.experts_in_parts"

    @staticmethod
    def forward(
        ctx: Any,
        x_SM: Tensor,
        weight_N: Tensor | None,
        layout: Layout,
        how: WeightParts,
        activation: str,
        *parts: Tensor,
    ) -> Tensor:
        w1, w2 = how.join([part.to(x_SM.dtype) for part in parts])
        y_SM, h = operators.experts(x_SM, weight_N, w1, w2, None, None, 0, *layout.tensors, activation)
        ctx.save_for_backward(h, x_SM, weight_N, *layout.tensors, *parts)
        ctx.how, ctx.activation = how, activation
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        h, x_SM, weight_N, *saved = ctx.saved_tensors
        layout, parts = saved[:5], saved[5:]
        w1, w2 = ctx.how.join([part.to(x_SM.dtype) for part in parts])
        given = (dy_SM, h, x_SM, weight_N, w1, w2, None, None, 0, *layout, ctx.activation)
        dx_SM, dweight_N, dw1, dw2, *_ = operators.experts_backward(*given)
        dparts = [grad.to(part.dtype) for grad, part in zip(ctx.how.split(dw1, dw2), parts, strict=True)]
        return dx_SM, None if weight_N is None else dweight_N, None, None, None, *dparts
