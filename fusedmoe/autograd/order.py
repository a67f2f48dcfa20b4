"""Order and its inverse as differentiable functions. None saves a tensor but the layout's integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels import operators
from fusedmoe.kernels.layout import Layout


def order(
    expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None
) -> Layout:
    """Sorts the routing slots by expert and drops what exceeds the capacity; deterministic.

    Within an expert, slot k of all tokens comes before slot k + 1 (GShard: a second choice never displaces a first
    one), tokens in order, or by descending `priority_S` (V-MoE's batch-prioritised routing, ties in token order).

    Args:
        expert_SK: [S, K] int64 chosen experts; -1 marks an empty slot.
        capacity: rows that an expert takes from these tokens; None takes all.
        priority_S: [S] higher goes first.
    Returns:
        A `Layout`. On CUDA and in a graph of `torch.compile` with slack rows, so that nothing waits for the device.
    """
    return Layout(*operators.order(expert_SK, experts, capacity, priority_S, torch.compiler.is_compiling()))


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """[S, M] -> [N, M]: a copy of each token's row for every slot that was kept, sorted by expert.

    The backward, `unpermute`, needs the layout only.
    """
    return x_SM if layout.source_N is None else operators.permute(x_SM, *layout.tensors)


def unpermute(rows_NM: Tensor, layout: Layout) -> Tensor:
    """[N, M] -> [S, M]: the sum of each token's rows, in slot order; zeros for a token whose slots were all dropped.

    The backward, `permute`, needs the layout only.
    """
    return rows_NM if layout.source_N is None else operators.unpermute(rows_NM, *layout.tensors)


def take_slots(value_SK: Tensor, layout: Layout) -> Tensor:
    """value_N: the value of the slot that each sorted row serves, as a router's weight.

    The backward reads the gradient of each slot's row; what stands in slack rows comes to nothing.
    """
    return operators.take_slots(value_SK, *layout.tensors)


def _keep_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _adjoint(there: Any, back: Any) -> None:
    """Registers two linear operators that take a layout as each other's backward."""
    for one, other in ((there, back), (back, there)):
        one.register_autograd(
            lambda ctx, grad, other=other: (other(grad, *ctx.saved_tensors), *(None,) * 5), setup_context=_keep_layout
        )


_adjoint(operators.permute, operators.unpermute)
_adjoint(operators.take_slots, operators.put_slots)
