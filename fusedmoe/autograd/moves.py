"""Dispatch, combine and their expert-sharding parts as differentiable functions, and the whole way through experts.

None of the moves saves a tensor. They are for functions that autograd sees, as often as it is asked to: a layer's own
way, in chunks and by a plan, is `fusedmoe.engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_integers, check_rows, check_tensor, refuse, require_values
from fusedmoe.autograd.hooks import Direction, HookContext, Hooks, run_hooks
from fusedmoe.autograd.linear import Move, linear
from fusedmoe.autograd.order import order
from fusedmoe.comm.exchange import Exchange
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder, span


def dispatch(
    rows_NM: Tensor, exchange: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
) -> Tensor:
    """[N, M] -> [R, M]: rows sorted by expert to rows received, by (source rank, local expert). Collective over ep; the
    backward is a combine."""
    there, back = _wire("dispatch", exchange, exchange.dispatch), _wire("combine", exchange, exchange.combine)
    return _both_ways(rows_NM, there, back, hooks, recorder)


def combine(
    rows_NM: Tensor, exchange: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
) -> Tensor:
    """[R, M] -> [N, M]: results of the rows received to results of the rows sent, in their order. Collective over ep;
    the backward dispatches."""
    there, back = _wire("combine", exchange, exchange.combine), _wire("dispatch", exchange, exchange.dispatch)
    return _both_ways(rows_NM, there, back, hooks, recorder)


def all_gather(rows_RM: Tensor, exchange: Exchange, recorder: Recorder | None = None) -> Tensor:
    """The rows of all expert-sharding peers. The backward is a reduce-scatter."""
    there, back = _shards(exchange)
    return _both_ways(rows_RM, there, back, (), recorder)


def reduce_scatter(rows_RM: Tensor, exchange: Exchange, recorder: Recorder | None = None) -> Tensor:
    """This rank's rows of the sum over the expert shards. The backward is an all-gather."""
    back, there = _shards(exchange)
    return _both_ways(rows_RM, there, back, (), recorder)


class _wire:
    """A move between nodes with its hooks and its span."""

    resource = "inter"

    def __init__(self, name: str, exchange: Exchange, move: Move) -> None:
        self.name, self.exchange, self.move = name, exchange, move

    def __call__(self, hooks: Sequence[Hooks], recorder: Recorder | None, direction: Direction, rows: Tensor) -> Tensor:
        if direction == "backward":
            self.exchange.turn()
        context = HookContext(direction)
        rows = run_hooks(hooks, f"before_{self.name}", rows, context)
        with span(recorder, self.name, kind=self.name, resource=self.resource, phase=direction):
            rows = self.move(rows)
        return run_hooks(hooks, f"after_{self.name}", rows, context)


class _shard(_wire):
    """The same inside a node, without hooks."""

    resource = "intra"


def _shards(exchange: Exchange) -> tuple[_shard, _shard]:
    scatter = _shard("reduce-scatter", exchange, exchange.reduce_scatter)
    return _shard("all-gather", exchange, exchange.all_gather), scatter


def _both_ways(rows: Tensor, there: _wire, back: _wire, hooks: Sequence[Hooks], recorder: Recorder | None) -> Tensor:
    return linear(
        rows, partial(there, hooks, recorder, "forward"), partial(back, hooks, recorder, "backward"), there.name
    )


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
    with span(recorder, "sort received rows", kind="permute"):
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
