"""Sorting, gathering and summing of rows as differentiable functions and operators.

The layout's integers are the only tensors saved for backward. Inconsistent shapes, dtypes or devices raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import (
    CHOICE,
    check_choice,
    check_count,
    check_layout,
    check_rows,
    check_tensor,
    refuse,
)
from fusedmoe.kernels import gather_sum
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient
from fusedmoe.kernels.layout import Layout, LayoutTensors, build_layout, row_bound


def order(expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None) -> Layout:
    """Sort the (token, k) pairs by expert and drop those that exceed the capacity. Deterministic.

    Within an expert, choice k of all tokens precedes choice k + 1 (GShard: a second choice never displaces a first
    one). Tokens keep their order, or are ordered by descending `priority_S` (V-MoE's batch-prioritised routing, ties in
    token order).

    Args:
        expert_SK: [S, K] chosen experts, integers; -1 marks an empty pair.
        capacity: maximum rows per expert from these tokens; None: unlimited.
        priority_S: [S], higher values are kept first.
    Returns:
        A `Layout`; on CUDA and under `torch.compile` with padding rows, which avoids a device synchronization.
    Raises:
        ConfigError: an expert id is neither -1 nor in [0, E). On CUDA and in compiled graphs a device assertion fails.
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
    # Sizes in a graph must not depend on values.
    tensors = order_operator(expert_SK.long(), experts, capacity, priority_S, torch.compiler.is_compiling())
    return Layout.of(tensors)


@operator("order")
def order_operator(
    expert_SK: Tensor, experts: int, capacity: int | None, priority_S: Tensor | None, padded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the five tensors of `build_layout`'s result. `padded`: pad to `row_bound` on CPUs as well."""
    layout = build_layout(expert_SK, experts, capacity, priority_S, f"order: {CHOICE.format(most=experts - 1)}")
    if padded:
        layout = layout.padded(row_bound(layout.tokens, layout.k, experts, capacity))
    assert layout.source_N is not None
    return layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK


@register_fake(order_operator)
def _(expert_SK: Tensor, experts: int, capacity: int | None, priority_S: Tensor | None, padded: bool) -> Any:
    tokens, K = expert_SK.shape
    rows: Any = row_bound(tokens, K, experts, capacity)
    if not padded and not expert_SK.is_cuda:
        rows = torch.library.get_ctx().new_dynamic_size()
    sizes = ((experts,), (rows,), (rows,), (tokens, K))
    counts_E, source_N, pair_N, row_SK = (expert_SK.new_empty(size, dtype=torch.long) for size in sizes)
    return counts_E, expert_SK.new_empty(experts + 1, dtype=torch.int32), source_N, pair_N, row_SK


def permute(x_SM: Tensor, layout: Layout) -> Tensor:
    """Copy each token's row for every kept pair, sorted by expert: [S, M] -> [N, M]; zeros in padding rows.

    Any dtype, any strides. The backward is `unpermute`.
    """
    check_layout("permute", layout)
    check_rows("permute", "x_SM", x_SM, layout.tokens, layout.row_SK)
    # Without sources, row n is token n.
    rows_NM: Tensor = x_SM if layout.source_N is None else permute_operator(x_SM, layout.tensors)
    return rows_NM


def unpermute(rows_NM: Tensor, layout: Layout) -> Tensor:
    """Sum each token's rows in the order of k: [N, M] -> [S, M]; zeros for a token whose pairs were all dropped.

    Any dtype, any strides. Padding rows are not read and have zero gradient. The backward is `permute`.
    """
    check_layout("unpermute", layout)
    check_rows("unpermute", "rows_NM", rows_NM, layout.rows, layout.row_SK)
    y_SM: Tensor = rows_NM if layout.source_N is None else unpermute_operator(rows_NM, layout.tensors)
    return y_SM


def take_pairs(value_SK: Tensor, layout: Layout) -> Tensor:
    """Gather a value per pair to the sorted rows: [S, K] -> [N]; zeros in padding rows.

    The backward scatters each row's gradient to its pair, with 0 for pairs without a row.
    """
    check_layout("take_pairs", layout)
    check_tensor("take_pairs", "value_SK", value_SK, layout.row_SK)
    if value_SK.shape != layout.row_SK.shape:
        shapes = f"{list(layout.row_SK.shape)} pairs, got {list(value_SK.shape)}"
        refuse("take_pairs", f"value_SK must have a value for each of the layout's {shapes}")
    value_N: Tensor = take_pairs_operator(value_SK, layout.tensors)
    return value_N


def row_weights(weight_SK: Tensor | None, layout: Layout) -> Tensor | None:
    """Return the router weight of each sorted row, [N], zero in padding rows; None (all weights are 1) for None."""
    return None if weight_SK is None else take_pairs(weight_SK, layout)


def _linear_operator(name: str, kernel: Callable[..., Tensor], shape: Callable[[Tensor, Layout], Any]) -> Any:
    def apply(value: Tensor, layout: LayoutTensors) -> Tensor:
        return kernel(value, Layout.of(layout))

    overload = operator(name)(apply)
    register_fake(overload)(lambda value, layout: value.new_empty(shape(value, Layout.of(layout))))
    return overload


def _register_adjoints(forward: Any, backward: Any) -> None:
    def keep_layout(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1])

    register_gradient(forward, lambda ctx, grad: (backward(grad, ctx.saved_tensors), None), keep_layout)
    register_gradient(backward, lambda ctx, grad: (forward(grad, ctx.saved_tensors), None), keep_layout)


permute_operator = _linear_operator("permute", gather_sum.permute, lambda x, layout: (layout.rows, x.shape[1]))
unpermute_operator = _linear_operator("unpermute", gather_sum.gather_sum, lambda x, layout: (layout.tokens, x.shape[1]))
take_pairs_operator = _linear_operator("take_pairs", gather_sum.take_pairs, lambda _, layout: layout.rows)
put_pairs_operator = _linear_operator("put_pairs", gather_sum.put_pairs, lambda _, layout: layout.row_SK.shape)
_register_adjoints(permute_operator, unpermute_operator)
_register_adjoints(take_pairs_operator, put_pairs_operator)
