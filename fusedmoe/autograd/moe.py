"""From routed tokens to their results: order, dispatch, all-gather, experts, reduce-scatter, combine, unorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_integers, check_rows, check_tensor, refuse, require_values
from fusedmoe.autograd.exchange import all_gather, combine, dispatch, reduce_scatter
from fusedmoe.autograd.hooks import Hooks
from fusedmoe.autograd.order import order
from fusedmoe.comm.exchange import Exchange
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder, span

# (rows, layout by local expert, weight of each sorted row or None) -> summed results, one for each of the rows given.
Compute = Callable[[Tensor, Layout, "Tensor | None"], Tensor]


def through_experts(
    rows_NM: Tensor,
    weight_N: Tensor | None,
    exchange: Exchange,
    compute: Compute,
    hooks: Sequence[Hooks] = (),
    recorder: Recorder | None = None,
) -> Tensor:
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
    rows_RM = all_gather(dispatch(rows_NM, exchange, hooks, recorder), exchange, recorder)
    weight_R = None
    if weight_N is not None:
        weight_R = all_gather(dispatch(weight_N[:, None], exchange), exchange)[:, 0]
    with span(recorder, "sort received rows", kind="order"):
        layout = received_layout(exchange.counts_RE, exchange.rows)
        sorted_weight_R = None if weight_R is None else weight_R[layout.pair_N]
    out_RM = compute(rows_RM, layout, sorted_weight_R)
    check_rows("through_experts", "the experts' result", out_RM, len(rows_RM))
    return combine(reduce_scatter(out_RM, exchange, recorder), exchange, hooks, recorder)


def received_layout(counts_RE: Tensor, rows: int | None = None) -> Layout:
    """Sorts received rows, which lie by (peer, local expert), by local expert.

    `rows`: the sum of the counts; with it nothing waits for the device.

    Raises:
        ConfigError: counts that are not [peers, experts] integers of at least 0, or of another sum.
    """
    check_integers("received_layout", "counts_RE", counts_RE, 2)
    right = (counts_RE >= 0).all()
    if rows is not None:
        right &= counts_RE.sum() == rows
    require_values("received_layout", right, "counts must not be negative, and `rows` must be their sum")
    peers, experts = counts_RE.shape
    expert_RE = torch.arange(experts, device=counts_RE.device).expand(peers, experts)
    expert_R1 = expert_RE.reshape(-1).repeat_interleave(counts_RE.reshape(-1), output_size=rows).view(-1, 1)
    return order(expert_R1, experts)
