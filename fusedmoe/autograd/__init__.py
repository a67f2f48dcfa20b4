"""Differentiable functions of an MoE layer, for models that bring their own modules.

    layout = order(expert_SK, experts=E)
    rows_NM, weight_N = permute(x_SM, layout), take_pairs(weight_SK, layout)
    y_SM = experts(x_SM, layout, weight_N, weights, "swiglu")

Route tokens with `gate`, sort routing decisions with `order`, move rows with `permute` and `unpermute`, and compute
with `experts` or `grouped_linear`. `dispatch`, `combine`, `all_gather` and `reduce_scatter` send rows between ranks by
the `Exchange` that `fusedmoe.comm.exchange_metadata` returns. All arguments are checked before a rank computes or
sends: ConfigError, or RankError on the other ranks.
"""

from __future__ import annotations

from fusedmoe.autograd.experts import WeightParts, experts, experts_in_parts
from fusedmoe.autograd.gate import GateChoice, GateRule, gate, gate_from_logits
from fusedmoe.autograd.grouped import clamped_swiglu, grouped_linear
from fusedmoe.autograd.low_rank import low_rank_experts, low_rank_linear
from fusedmoe.autograd.moves import all_gather, combine, dispatch, received_layout, reduce_scatter, through_experts
from fusedmoe.autograd.order import order, permute, take_pairs, unpermute
from fusedmoe.autograd.parallel import (
    gather_rows,
    join_rows,
    name_for_graphs,
    reduce_scatter_rows,
    split_counts,
    split_rows,
)

__all__ = [
    "GateChoice",
    "GateRule",
    "WeightParts",
    "all_gather",
    "clamped_swiglu",
    "combine",
    "dispatch",
    "experts",
    "experts_in_parts",
    "gate",
    "gate_from_logits",
    "gather_rows",
    "grouped_linear",
    "join_rows",
    "low_rank_experts",
    "low_rank_linear",
    "name_for_graphs",
    "order",
    "permute",
    "received_layout",
    "reduce_scatter",
    "reduce_scatter_rows",
    "split_counts",
    "split_rows",
    "take_pairs",
    "through_experts",
    "unpermute",
]
