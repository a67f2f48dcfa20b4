"""Dispatch, combine and their expert-sharding parts as differentiable functions of an exchange, for models of your own.

None of them saves a tensor, and autograd sees them as often as it is asked to. A layer's own way goes by operators,
which graphs can hold (`autograd/exchange_operators.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_integers, check_rows, check_tensor, refuse, require_values
from fusedmoe.autograd.order import order
from fusedmoe.comm.exchange import Exchange
from fusedmoe.kernels.deduplicate import rows_of_counts
from fusedmoe.kernels.derivatives import Move, linear
from fusedmoe.kernels.layout import Layout


def dispatch(rows_NM: Tensor, exchange: Exchange) -> Tensor:
    """Sends rows sorted by expert: [N, M] -> [R, M], by (source rank, local expert). Collective over ep; the backward
    is a combine."""
    return linear(rows_NM, exchange.dispatch, _backward(exchange, exchange.combine), "dispatch")


def combine(rows_NM: Tensor, exchange: Exchange) -> Tensor:
    """Brings results of received rows back: [R, M] -> [N, M], in the order of the rows sent. Collective over ep; the
    backward dispatches."""
    return linear(rows_NM, exchange.combine, _backward(exchange, exchange.dispatch), "combine")


def all_gather(rows_RM: Tensor, exchange: Exchange) -> Tensor:
    """Returns the rows of all expert-sharding peers. The backward is a reduce-scatter."""
    return linear(rows_RM, exchange.all_gather, _backward(exchange, exchange.reduce_scatter), "all-gather")


def reduce_scatter(rows_RM: Tensor, exchange: Exchange) -> Tensor:
    """Returns this rank's rows of the sum over the expert shards. The backward is an all-gather."""
    return linear(rows_RM, exchange.reduce_scatter, _backward(exchange, exchange.all_gather), "reduce-scatter")


def _backward(exchange: Exchange, move: Move) -> Move:
    def turned(rows: Tensor) -> Tensor:
        # Ranks compare first what they call: this one may be the only one that has a backward pass.
        exchange.turn()
        return move(rows)

    return turned


# (rows, layout by local expert, weight of each sorted row or None) -> summed results, one for each of the rows given.
Compute = Callable[[Tensor, Layout, "Tensor | None"], Tensor]


def through_experts(rows_NM: Tensor, weight_N: Tensor | None, exchange: Exchange, compute: Compute) -> Tensor:
    """Sends rows to their experts' ranks, computes there and brings the results back in the rows' order.

    Router weights travel with the rows: the experts' ranks apply them, so that no result has to be kept for their
    gradient, which travels back the same way.

    Args:
        rows_NM: [N, M] rows sorted by global expert, as `exchange` was told.
        weight_N: [N] router weights, or None for 1.
        compute: the local experts; their results may have another width.
    Returns:
        [N, M] weighted results, as wide as the experts make them.
    Raises:
        ConfigError, RankError: rows, weights or the experts' results that are not as many as the exchange has.
    """
    check_rows("through_experts", "rows_NM", rows_NM, exchange.sent)
    if weight_N is not None:
        check_tensor("through_experts", "weight_N", weight_N, rows_NM)
        if weight_N.shape != rows_NM.shape[:1]:
            shapes = f"each of {len(rows_NM)} rows, got {list(weight_N.shape)}"
            refuse("through_experts", f"weight_N must have a number for {shapes}")
    rows_RM = all_gather(dispatch(rows_NM, exchange), exchange)
    layout, weight_R = received_layout(exchange.counts_RE, exchange.rows), None
    if weight_N is not None:
        # A column, so that weights go the way of rows, and their gradients back.
        weight_R = all_gather(dispatch(weight_N[:, None], exchange), exchange)[layout.pair_N, 0]
    out_RM = compute(rows_RM, layout, weight_R)
    check_rows("through_experts", "the experts' result", out_RM, len(rows_RM))
    return combine(reduce_scatter(out_RM, exchange), exchange)


def received_layout(counts_RE: Tensor, rows: int | None = None) -> Layout:
    """Sorts received rows, which lie by (peer, local expert), by local expert.

    Args:
        counts_RE: [peers, experts] rows of each.
        rows: the sum of the counts; with it nothing waits for the device.
    Raises:
        ConfigError: counts that are not [peers, experts] integers of at least 0, or of another sum.
    """
    check_integers("received_layout", "counts_RE", counts_RE, 2)
    right = (counts_RE >= 0).all()
    if rows is not None:
        right &= counts_RE.sum() == rows
    require_values("received_layout", right, "counts must not be negative, and `rows` must be their sum")
    if torch.compiler.is_compiling():  # the operator has sizes that a graph can hold
        experts = counts_RE.shape[1]
        expert_RE = torch.arange(experts, device=counts_RE.device).expand(counts_RE.shape)
        expert_R = expert_RE.reshape(-1).repeat_interleave(counts_RE.reshape(-1), output_size=rows)
        return order(expert_R.view(-1, 1), experts)
    rows = int(counts_RE.sum()) if rows is None else rows
    return rows_of_counts(counts_RE, rows).sort(rows, counts_RE.shape[1], 1)[0]
