"""GShard's noisy top-k gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import GateChoice, gate_from_logits
from fusedmoe.layers.gates import fused
from fusedmoe.layers.gates.base import INIT_STD, Gate, Routing, fill_normal
from fusedmoe.layers.gates.router import pick, router_dtype, router_logits, top_experts
from fusedmoe.layers.gates.topk import noisy_load_importance
from fusedmoe.losses import balance_loss, z_loss

_MIN_STD = 1e-6  # softplus can underflow; the smooth load divides by it


class GShard(Gate):
    """Noisy top-k with learned noise (Shazeer et al. 2017, eq. 3–5; FSMoE §2.1 under GShard's name).

    h = x·W_gᵀ + N(0,1)·softplus(x·W_noiseᵀ), weight = softmax(KeepTopK(h, k)), where KeepTopK sets all but
    the k highest to −∞. Between equal h the lower expert wins. With k = 1 the weight is the constant 1, and
    the router learns from the auxiliary losses alone: that is the equation; ``Switch`` is the gate for k = 1.

    Random: the noise, in training only (one draw per token and expert); in evaluation h = x·W_gᵀ.
    Parameters: ``weight_EM`` [E, M]; ``noise_weight_EM`` [E, M], zero at the start as in the paper (a
    standard deviation of ln 2 everywhere).
    Losses: "balance" (softmax over all of h; share of all k choices), "importance_load" (the paper's:
    importance from the weights, load from the learned noise), "z" (of h).
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "importance_load", "z")
    default_aux: ClassVar[Mapping[str, float]] = {"balance": 1.0}
    weight_EM: nn.Parameter
    noise_weight_EM: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 2,
        capacity_factor: float | None = None,
        *,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim), "noise_weight_EM": (self.experts, model_dim)}

    def reset_parameters(self) -> None:
        fill_normal(self.weight_EM, INIT_STD)
        nn.init.zeros_(self.noise_weight_EM)

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        if not self.training:
            return ()
        return (torch.randn(len(x_SM), self.experts, dtype=router_dtype(x_SM), device=x_SM.device),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Noisy logits; where they are used, also those without noise and its standard deviation."""
        if self.training or "importance_load" in self.aux:
            # one product for both: x is read once, its gradient written once
            both = router_logits(x_SM, torch.cat((self.weight_EM, self.noise_weight_EM)))
            clean_SE, raw_SE = both.split(self.experts, dim=1)
            std_SE = nn.functional.softplus(raw_SE)
            noisy_SE = clean_SE + drawn[0] * std_SE if drawn else clean_SE
            return noisy_SE, clean_SE, std_SE
        return (router_logits(x_SM, self.weight_EM),)

    def choose(self, *scores: Tensor) -> Routing:
        noisy_SE = scores[0]
        choice: GateChoice | None = None
        if fused.serves(self, noisy_SE):
            choice = gate_from_logits(noisy_SE, fused.make_rule(self, "softmax", normalize=True))
            expert_SK, weight_SK = choice.expert_SK, choice.weight_SK
        else:
            expert_SK = top_experts(noisy_SE, self.k)
            weight_SK = pick(noisy_SE, expert_SK).softmax(1)

        def importance_load() -> Tensor:
            _, clean_SE, std_SE = scores
            gate_SE = torch.zeros_like(noisy_SE).scatter(1, expert_SK, weight_SK)
            return noisy_load_importance(gate_SE, clean_SE, noisy_SE, std_SE.clamp(min=_MIN_STD), self.k)

        if choice is not None:
            return fused.make_routing(self, choice, {"importance_load": importance_load})
        terms = {
            "balance": lambda: balance_loss(noisy_SE.softmax(1), expert_SK),
            "importance_load": importance_load,
            "z": lambda: z_loss(noisy_SE),
        }
        return Routing(
            expert_SK=expert_SK,
            weight_SK=weight_SK,
            capacity=self.row_capacity(noisy_SE.shape[0]),
            priority_S=None,
            aux_loss=self.weigh(noisy_SE, terms),
            logits_SE=noisy_SE.detach(),
        )
