"""The layer as one process would define it: every token through its experts, no parallelism, no fused kernels.

Routing is decided rank by rank, as the layer defines it; everything after it is plain differentiable torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedmoe.kernels.experts import Weights, define_experts
from fusedmoe.kernels.layout import define_layout
from fusedmoe.layers.expert_networks import Custom, Experts, FeedForward
from fusedmoe.layers.gates.base import SoftRouting
from fusedmoe.layers.moe import MoELayer


class ShardedExpert(nn.Module):
    """A user's expert that can be split: tanh(x·A)·B with the columns of A and the rows of B divided over shards."""

    def __init__(self, model_dim: int, shard: int = 0, shards: int = 1, hidden: int = 4) -> None:
        super().__init__()
        a, b = torch.randn(model_dim, hidden), torch.randn(hidden, model_dim)
        self.a = nn.Parameter(a.chunk(shards, 1)[shard].clone())
        self.b = nn.Parameter(b.chunk(shards, 0)[shard].clone())

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.a) @ self.b


def run_expert(experts: Experts, number: int, row_M: Tensor) -> Tensor:
    """One row through one expert of an unsharded set of all experts."""
    if isinstance(experts, Custom):
        result: Tensor = experts.experts[str(number)](row_M[None])[0]
        return result
    assert isinstance(experts, FeedForward)
    own = slice(number, number + 1)
    b1, b2 = (None if bias is None else bias[own] for bias in (experts.b1, experts.b2))
    one = Weights(experts.w1[own], experts.w2[own], b1, b2)
    layout = define_layout(torch.zeros(1, 1, dtype=torch.long), 1)
    return define_experts(row_M[None], layout, None, one, experts.activation)[0]


def dense_forward(layer: MoELayer, x_SM: Tensor, dropless: bool) -> tuple[Tensor, Tensor]:
    """y_SM and the auxiliary loss of one rank's tokens, from a layer that holds all experts."""
    routing = layer.gate(x_SM)
    experts = layer.gate.experts
    if isinstance(routing, SoftRouting):
        rows_NM = routing.dispatch_SN.t() @ x_SM
        out = [run_expert(layer.experts, n // routing.slots, row) for n, row in enumerate(rows_NM)]
        y_SM = routing.combine_SN @ torch.stack(out)
    else:
        capacity = None if dropless else routing.capacity
        kept_SK = define_layout(routing.expert_SK, experts, capacity, routing.priority_S).row_SK >= 0
        y = []
        for s in range(len(x_SM)):
            y_M = torch.zeros_like(x_SM[s])
            for k, number in enumerate(routing.expert_SK[s].tolist()):
                if kept_SK[s, k]:
                    y_M = y_M + routing.weight_SK[s, k] * run_expert(layer.experts, number, x_SM[s])
            y.append(y_M)
        y_SM = torch.stack(y) if y else x_SM.clone()
    if layer.shared is not None:
        shared = [run_expert(layer.shared, 0, row) for row in x_SM]
        y_SM = y_SM + torch.stack(shared) if shared else y_SM
    return y_SM, routing.aux_loss
