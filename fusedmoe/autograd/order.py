"""Order and its inverse as differentiable functions. None saves a tensor but the layout's integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_choice, check_count, check_layout, check_rows, check_tensor, refuse
from fusedmoe.kernels import operators
from fusedmoe.kernels.derivatives import register_gradient
from fusedmoe.kernels.layout import Layout


def order(expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None) -> Layout:
    """Sorts the (token, k) pairs by expert and drops what exceeds the capacity; deterministic.

    Within an expert, choice k of all tokens comes before choice k + 1 (GShard: a second choice never displaces a first
    one), tokens in order, or by descending `priority_S` (V-MoE's batch-prioritised routing, ties in token order).

    Args:
        expert_SK: [S, K] chosen experts, integers; -1 marks an empty pair.
        experts: E.
        capacity: rows that an expert takes from these tokens; None takes all.
        priority_S: [S] higher goes first.
    Returns:
        A `Layout`. On CUDA and in a graph of `torch.compile` with padding rows, so that nothing waits for the device.
    Raises:
        ConfigError: sizes or dtypes that do not fit; a number that is neither -1 nor in [0, E). On CUDA and in compiled
            graphs such a number fails an assertion on the device.
    """
    check_choice("order", expert_SK, experts)
    if capacity is not None:
        check_count("order", "capacity", capacity, 0)
    if priority_S is not None:
        check_tensor("order", "priority_S", priority_S, expert_SK)
        if priority_S.shape != expert_SK.shape[:1]:
            shapes = f"{list(priority_S.shape)} for {list(expert_SK.shape)} choices"
            refuse("order", f"priority_S must have one number for each token, got {shapes}")
        priority_S = priority_S.detach()
    found = operators.order(expert_SK.long(), experts, capacity, priority_S, torch.compiler.is_compiling())
    counts_E, offsets_E1, source_N, pair_N, row_SK = found
    return Layout(counts_E, offsets_E1, source_N, pair_N, row_SK, verified=True)


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """[S, M] -> [N, M]: a copy of each token's row for every pair that was kept, sorted by expert; zeros in padding.

    Any dtype, any strides. The backward, `unpermute`, needs the layout only.

    Raises:
        ConfigError: shapes or devices that do not fit.
    """
    check_layout("permute", layout)
    check_rows("permute", "x_SM", x_SM, layout.tokens, layout.row_SK)
    return x_SM if layout.source_N is None else operators.permute(x_SM, *layout.tensors)


def unpermute(rows_NM: Tensor, layout: Layout) -> Tensor:
    """[N, M] -> [S, M]: the sum of each token's rows, k by k; zeros for a token whose pairs were all dropped.

    Any dtype, any strides; padding rows are not read, and their gradient is zero. The backward, `permute`, needs the
    layout only.

    Raises:
        ConfigError: shapes or devices that do not fit.
    """
    check_layout("unpermute", layout)
    check_rows("unpermute", "rows_NM", rows_NM, layout.rows, layout.row_SK)
    return rows_NM if layout.source_N is None else operators.unpermute(rows_NM, *layout.tensors)


def take_pairs(value_SK: Tensor, layout: Layout) -> Tensor:
    """[S, K] -> [N]: the value of the pair that each sorted row serves, such as its router weight; zeros in padding.

    The backward gives each pair its row's gradient, 0 to pairs without a row; it needs the layout only.

    Raises:
        ConfigError: shapes or devices that do not fit.
    """
    check_layout("take_pairs", layout)
    check_tensor("take_pairs", "value_SK", value_SK, layout.row_SK)
    if value_SK.shape != layout.row_SK.shape:
        shapes = f"{list(layout.row_SK.shape)} pairs, got {list(value_SK.shape)}"
        refuse("take_pairs", f"value_SK must have a value for each of the layout's {shapes}")
    return operators.take_pairs(value_SK, *layout.tensors)


def _keep_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _adjoint(there: Any, back: Any) -> None:
    """Registers two linear operators that take a layout as each other's backward."""
    for one, other in ((there, back), (back, there)):

        def backward(ctx: Any, grad: Tensor, other: Any = other) -> tuple[Tensor | None, ...]:
            return other(grad, *ctx.saved_tensors), *(None,) * 5

        register_gradient(one, backward, _keep_layout)


_adjoint(operators.permute, operators.unpermute)
_adjoint(operators.take_pairs, operators.put_pairs)
