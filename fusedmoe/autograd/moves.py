"""Dispatch, combine, all-gather and reduce-scatter as differentiable functions of an `Exchange`, for custom models.

None saves a tensor, and all are differentiable any number of times. `MoELayer` uses `autograd/exchange_operators.py`,
whose operators compiled graphs can hold.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusedmoe.autograd.checks import check_rows, check_tensor, refuse
from fusedmoe.comm.exchange import Exchange
from fusedmoe.kernels.deduplicate import pairs_from_counts
from fusedmoe.kernels.derivatives import LinearMap, linear
from fusedmoe.kernels.layout import Layout


def dispatch(rows_NM: Tensor, exchange: Exchange) -> Tensor:
    """Send rows to their experts' ranks: [N, M] by global expert -> [R, M] by (source rank, local expert).

    Collective over ep.
    """
    return linear(rows_NM, exchange.dispatch, _backward(exchange, exchange.combine), "dispatch")


def combine(rows_NM: Tensor, exchange: Exchange) -> Tensor:
    """Return results of received rows to their source ranks: [R, M] -> [N, M], in the order of the rows sent.

    Collective over ep.
    """
    return linear(rows_NM, exchange.combine, _backward(exchange, exchange.dispatch), "combine")


def all_gather(rows_RM: Tensor, exchange: Exchange) -> Tensor:
    """All-gather the rows over the shards of an expert."""
    return linear(rows_RM, exchange.all_gather, _backward(exchange, exchange.reduce_scatter), "all-gather")


def reduce_scatter(rows_RM: Tensor, exchange: Exchange) -> Tensor:
    """Sum the rows over the shards of an expert and return this rank's part."""
    return linear(rows_RM, exchange.reduce_scatter, _backward(exchange, exchange.all_gather), "reduce-scatter")


def _backward(exchange: Exchange, move: LinearMap) -> LinearMap:
    def compare_and_move(rows: Tensor) -> Tensor:
        # Compare calls first, because this rank may be the only one with a backward pass.
        exchange.begin_backward()
        return move(rows)

    return compare_and_move


# Rows, their layout by local expert, and the weight of each sorted row (or None) -> one summed result per row.
Compute = Callable[[Tensor, Layout, "Tensor | None"], Tensor]


def through_experts(rows_NM: Tensor, weight_N: Tensor | None, exchange: Exchange, compute: Compute) -> Tensor:
    """Send rows to the ranks of their experts, compute there, and return the results in the rows' order.

    Router weights are sent with the rows and applied on the experts' ranks, so no result is saved for their gradient.

    Args:
        rows_NM: [N, M] rows sorted by global expert, with the counts given to `exchange`.
        weight_N: [N] router weights, or None for 1.
        compute: the local experts.
    Returns:
        [N, M'] weighted results, with the width of the experts' results.
    Raises:
        ConfigError, RankError: the number of rows, weights or results differs from the exchange's.
    """
    check_rows("through_experts", "rows_NM", rows_NM, exchange.num_sent)
    if weight_N is not None:
        check_tensor("through_experts", "weight_N", weight_N, rows_NM)
        if weight_N.shape != rows_NM.shape[:1]:
            shapes = f"each of {len(rows_NM)} rows, got {list(weight_N.shape)}"
            refuse("through_experts", f"weight_N must have a number for {shapes}")
    rows_RM = all_gather(dispatch(rows_NM, exchange), exchange)
    received = pairs_from_counts(exchange.counts_RE, exchange.num_rows)
    layout, _ = received.sort(exchange.num_rows, exchange.counts_RE.shape[1], 1)
    weight_R = None
    if weight_N is not None:
        # A column, because weights and their gradients are exchanged like rows.
        weight_R = all_gather(dispatch(weight_N[:, None], exchange), exchange)[layout.pair_N, 0]
    out_RM = compute(rows_RM, layout, weight_R)
    check_rows("through_experts", "the experts' result", out_RM, len(rows_RM))
    return combine(reduce_scatter(out_RM, exchange), exchange)
