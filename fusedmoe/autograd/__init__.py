"""Differentiable functions of an MoE layer, for models with custom modules.

    layout = order(expert_SK, experts=E)
    rows_NM, weight_N = permute(x_SM, layout), row_weights(weight_SK, layout)
    y_SM = experts(x_SM, layout, weight_N, weights, "swiglu")

`through_experts` sends rows to the ranks of their experts; it takes the `Exchange` returned by
`fusedmoe.comm.exchange_metadata`. Every function validates its arguments before it computes or sends: ConfigError, or
RankError on the other ranks.
"""

from __future__ import annotations

from fusedmoe.autograd.experts import experts
from fusedmoe.autograd.gate import gate
from fusedmoe.autograd.moves import through_experts
from fusedmoe.autograd.order import order, permute, row_weights, unpermute

__all__ = [
    "experts",
    "gate",
    "order",
    "permute",
    "row_weights",
    "through_experts",
    "unpermute",
]
