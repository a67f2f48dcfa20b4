"""Plain top-k with softmax, and what is one step away from it: Switch and Batch-Prioritised routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import GateRule, gate, gate_from_logits
from fusedmoe.layers.gates import fused
from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.layers.gates.router import pick, router_dtype, router_logits, top_experts
from fusedmoe.losses import balance_loss, load_importance_loss, z_loss


class TopK(Gate):
    """Softmax over all experts, the k most probable ones (Shazeer et al. 2017; Mixtral, Tutel).

    p = softmax(x·Wᵀ + noise·N(0,1)/E); experts = top-k of p; weight = p of the chosen, divided by their sum
    when ``normalize`` and k > 1. Between equal logits the lower expert wins. With k = 1 the weight stays p,
    or the router would get no gradient.

    Random: the noise, in training only and only when ``noise`` > 0 (one draw per token and expert).
    Parameters: ``weight_EM`` [E, M].
    Losses: "balance" (share of all k choices), "z", and with noise "importance_load" (importance from the
    probabilities without noise, load as Shazeer's: the threshold of an expert leaves that expert out).

    Args:
        normalize: divide the weights of a token by their sum (k > 1).
        noise: multiple of 1/E that is the standard deviation of the noise on the logits (V-MoE uses 1).
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "importance_load", "z")
    default_aux: ClassVar[Mapping[str, float]] = {"balance": 1.0}
    weight_EM: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 2,
        capacity_factor: float | None = None,
        *,
        normalize: bool = True,
        noise: float = 0.0,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)
        self.require(0 <= noise < torch.inf, f"noise must be at least 0, got {noise}")
        self.require(
            noise > 0 or "importance_load" not in self.aux,
            "the load-and-importance loss is defined by the noise: give noise > 0",
        )
        self.normalize = normalize
        self.noise = noise

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    def route(self, x_SM: Tensor) -> Routing:
        drawn = self.draw(x_SM)
        if not drawn and "importance_load" not in self.aux and fused.serves(self, x_SM, self.weight_EM):
            return fused.make_routing(self, gate(x_SM, self.weight_EM, self._rule()))
        return self.choose(*self.score(x_SM, *drawn))

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        if not (self.noise > 0 and self.training):
            return ()
        return (torch.randn(len(x_SM), self.experts, dtype=router_dtype(x_SM), device=x_SM.device),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        clean_SE = router_logits(x_SM, self.weight_EM)
        return (clean_SE, *(clean_SE + noise_SE * (self.noise / self.experts) for noise_SE in drawn))

    def choose(self, *scores: Tensor) -> Routing:
        return self.route_by(scores[-1], scores[0])

    def _rule(self) -> GateRule:
        return fused.make_rule(self, "softmax", normalize=self.normalize and self.k > 1)

    def route_by(self, logits_SE: Tensor, clean_SE: Tensor) -> Routing:
        """Choice, weights and losses from the logits; ``clean_SE`` are those without noise."""

        def importance_load() -> Tensor:
            std = self.noise / self.experts
            return noisy_load_importance(clean_SE.softmax(1), clean_SE, logits_SE, std, self.k)

        if fused.serves(self, logits_SE):
            choice = gate_from_logits(logits_SE, self._rule())
            return fused.make_routing(self, choice, {"importance_load": importance_load})
        expert_SK = top_experts(logits_SE, self.k)
        prob_SE = None
        if self.normalize and self.k > 1:
            # softmax over the chosen logits is p / Σp of the chosen, without the underflow of p
            weight_SK = pick(logits_SE, expert_SK).softmax(1)
        else:
            prob_SE = logits_SE.softmax(1)
            weight_SK = prob_SE.gather(1, expert_SK)

        def balance() -> Tensor:
            return balance_loss(logits_SE.softmax(1) if prob_SE is None else prob_SE, expert_SK)

        terms = {"balance": balance, "importance_load": importance_load, "z": lambda: z_loss(logits_SE)}
        return Routing(
            expert_SK=expert_SK,
            weight_SK=weight_SK,
            capacity=self.row_capacity(logits_SE.shape[0]),
            priority_S=None,
            aux_loss=self.weigh(logits_SE, terms),
            logits_SE=logits_SE.detach(),
        )


class Switch(TopK):
    """One expert per token, weighted by its probability (Fedus et al. 2022, Switch Transformer).

    In training x is first multiplied by U(1 − jitter, 1 + jitter), one draw per element, so that the router
    explores; p = softmax(x·Wᵀ); the expert is argmax p, its weight p.

    Random: the jitter, in training only (S·M draws; it and the jittered input are kept for backward).
    Parameters: ``weight_EM`` [E, M]. Losses: "balance" (the paper's), "z".

    Args:
        jitter: 0 ≤ jitter < 1; 0 turns it off.
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "z")

    def __init__(
        self,
        experts: int,
        capacity_factor: float | None = None,
        *,
        jitter: float = 0.01,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, 1, capacity_factor, aux=aux)
        self.require(0 <= jitter < 1, f"jitter must be at least 0 and below 1, got {jitter}")
        self.jitter = jitter

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        if not (self.jitter and self.training):
            return ()
        factor_SM = torch.empty(x_SM.shape, dtype=router_dtype(x_SM), device=x_SM.device)
        return (factor_SM.uniform_(1 - self.jitter, 1 + self.jitter),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        for factor_SM in drawn:
            x_SM = x_SM * factor_SM
        return super().score(x_SM)


class BatchPrioritised(TopK):
    """Top-k in which the surest tokens are placed first (Riquelme et al. 2021, V-MoE, algorithm 2).

    As ``TopK``, and ``priority_S`` = max_e p_e: when an expert is full, the tokens with the lowest priority
    are dropped instead of the last ones. V-MoE uses ``noise`` = 1 and weights that are not normalised (the
    default here). A token's fate depends on the whole batch.

    Random, parameters, losses: those of ``TopK``.
    """

    needs_whole_batch: ClassVar[bool] = True

    def __init__(
        self,
        experts: int,
        k: int = 2,
        capacity_factor: float | None = None,
        *,
        normalize: bool = False,
        noise: float = 0.0,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, normalize=normalize, noise=noise, aux=aux)

    def route(self, x_SM: Tensor) -> Routing:
        routing = super().route(x_SM)
        if self.normalize and self.k > 1:
            assert routing.logits_SE is not None
            priority_S = routing.logits_SE.softmax(1).amax(1)
        else:
            priority_S = routing.weight_SK.detach()[:, 0]
        return dataclasses.replace(routing, priority_S=priority_S)


def noisy_load_importance(
    gate_SE: Tensor, clean_SE: Tensor, noisy_SE: Tensor, noise_std: Tensor | float, k: int
) -> Tensor:
    """``load_importance_loss`` with Shazeer's threshold: the k-th highest noisy logit of the other experts.

    All tensors [S, E]; ``noise_std`` a number or a tensor. With k = E every expert is always chosen: the load
    is even.
    """
    E = clean_SE.shape[1]
    if k == E:
        return load_importance_loss(gate_SE, clean_SE.detach(), clean_SE.detach(), 1.0)
    best_SK = top_experts(noisy_SE, k + 1)
    value_SK = noisy_SE.gather(1, best_SK)
    chosen_SE = torch.zeros_like(noisy_SE, dtype=torch.bool).scatter_(1, best_SK[:, :k], True)
    threshold_SE = torch.where(chosen_SE, value_SK[:, k:], value_SK[:, k - 1 : k])
    return load_importance_loss(gate_SE, clean_SE, threshold_SE, noise_std)
