"""Sigmoid gate of BASE layers and StableMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import gate
from fusedmoe.layers.gates import fused
from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.layers.gates.router import pick, router_logits, top_experts
from fusedmoe.losses import balance_loss, z_loss


class Sigmoid(Gate):
    """The k highest logits, each weighted by its sigmoid (Lewis et al. 2021, BASE; Dai et al. 2022,
    StableMoE).

    h = x·Wᵀ, weight = σ(h) of the chosen, not normalised over them: a helpful expert raises its own score
    without lowering another's. Between equal logits the lower expert wins. The choice is greedy, as in
    StableMoE and in BASE's evaluation; BASE's balanced assignment in training is not part of the gate.

    Random: nothing. Parameters: ``weight_EM`` [E, M].
    Losses: "balance" (on σ(h) divided by its sum over all experts; share of all k choices), "z". Default:
    none.
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "z")
    weight_EM: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 1,
        capacity_factor: float | None = None,
        *,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    def route(self, x_SM: Tensor) -> Routing:
        if fused.serves(self, x_SM, self.weight_EM):
            rule = fused.make_rule(self, "sigmoid", normalize=False)
            return fused.make_routing(self, gate(x_SM, self.weight_EM, rule))
        return self.choose(*self.score(x_SM))

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return (router_logits(x_SM, self.weight_EM),)

    def choose(self, *scores: Tensor) -> Routing:
        (logits_SE,) = scores
        expert_SK = top_experts(logits_SE, self.k)
        terms = {
            "balance": lambda: balance_loss(share_of_sum(logits_SE.sigmoid()), expert_SK),
            "z": lambda: z_loss(logits_SE),
        }
        return Routing(
            expert_SK=expert_SK,
            weight_SK=pick(logits_SE, expert_SK).sigmoid(),
            capacity=self.row_capacity(logits_SE.shape[0]),
            priority_S=None,
            aux_loss=self.weigh(logits_SE, terms),
            logits_SE=logits_SE.detach(),
        )


def share_of_sum(score_SN: Tensor) -> Tensor:
    """Non-negative scores [S, N], each row divided by its sum; a row of zeros stays zero."""
    tiny = torch.finfo(score_SN.dtype).tiny
    return score_SN / score_SN.sum(1, keepdim=True).clamp(min=tiny)
