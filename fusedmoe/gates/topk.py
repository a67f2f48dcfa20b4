"""Softmax gates: top-k, Switch, Batch-Prioritised Routing, GShard's noisy gate, and X-MoE's cosine gate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import gate_from_logits
from fusedmoe.gates.base import (
    INIT_STD,
    RouterGate,
    Routing,
    SoftRouting,
    check_count,
    fill_normal,
    router_dtype,
    router_logits,
    unit_vectors,
)
from fusedmoe.gates.choice_override import THREAD_STATE, active_override
from fusedmoe.kernels.derivatives import linear
from fusedmoe.kernels.gate import GateRule
from fusedmoe.losses import balance_loss, load_importance_loss, z_loss

_MIN_STD = 1e-6  # softplus can underflow; the smooth load divides by it
_MAX_LOG_SCALE = math.log(100.0)


class TopK(RouterGate):
    """Softmax over all experts, then top-k (Shazeer et al. 2017; Mixtral, Tutel).

    p = softmax(x·Wᵀ + noise·N(0,1)/E); experts = top-k of p, ties by lower index; weight = p of the selected experts,
    divided by their sum if `normalize` and k > 1. (With k = 1 the router would then get no gradient.)

    Random: the noise, in training only if `noise` > 0 (one draw per token and expert). Parameters: `weight_EM` [E, M].
    Losses: "balance" (counts all k choices), "z", and with noise "importance_load" (importance from the noise-free
    probabilities; Shazeer's load, whose threshold for an expert excludes that expert).

    Args:
        normalize: divide the weights of a token by their sum (k > 1).
        noise: standard deviation of the noise on the logits in units of 1/E (V-MoE uses 1).
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "importance_load", "z")
    default_aux: ClassVar[Mapping[str, float]] = {"balance": 1.0}

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
            noise > 0 or "importance_load" not in self.aux, "the loss 'importance_load' requires noise: pass noise > 0"
        )
        self.normalize = normalize
        self.noise = noise

    @property
    def one_kernel(self) -> bool:
        return "importance_load" not in self.aux

    @property
    def normalizes(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        return self.normalize and self.k > 1

    def rule(self) -> GateRule:
        return self.make_rule("softmax", normalize=self.normalizes)

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        if not (self.noise > 0 and self.training):
            return ()
        return (torch.randn(x_SM.shape[0], self.experts, dtype=router_dtype(x_SM), device=x_SM.device),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Return the noise-free logits and, if noise was drawn, the noisy logits."""
        clean_SE = router_logits(x_SM, self.weight_EM)
        return (clean_SE, *(clean_SE + noise_SE * (self.noise / self.experts) for noise_SE in drawn))

    def choose(self, *scores: Tensor) -> Routing:
        logits_SE = scores[-1]

        def importance_load() -> Tensor:
            return self._importance_load(scores, expert_SK, weight_SK)

        if self.has_kernel_for(logits_SE):
            choice = gate_from_logits(logits_SE, self.rule())
            expert_SK, weight_SK = choice.expert_SK, choice.weight_SK
            return self.routing_of(choice, {"importance_load": importance_load})
        expert_SK = top_experts(logits_SE, self.k)
        prob_SE = None
        if self.normalizes:
            # Softmax over the selected logits is p / Σp, without underflow of p.
            weight_SK = gather_selected(logits_SE, expert_SK).softmax(1)
        else:
            prob_SE = logits_SE.softmax(1)
            weight_SK = prob_SE.gather(1, expert_SK)

        def balance() -> Tensor:
            return balance_loss(logits_SE.softmax(1) if prob_SE is None else prob_SE, expert_SK)

        terms = {"balance": balance, "importance_load": importance_load, "z": lambda: z_loss(logits_SE)}
        return self.routing(expert_SK, weight_SK, logits_SE, terms)

    def _importance_load(self, scores: tuple[Tensor, ...], expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        clean_SE, std = scores[0], self.noise / self.experts
        # Shazeer's load is smooth in the logits through the noise distribution.
        return noisy_load_importance(clean_SE.softmax(1), clean_SE, scores[-1], std, self.k)


class Switch(TopK):
    """Top-1 gate weighted by the expert's probability (Fedus et al. 2022, Switch Transformer).

    In training, x is first multiplied by U(1 − jitter, 1 + jitter), one draw per element. Then p = softmax(x·Wᵀ), the
    expert is argmax p, and its weight p.

    Random: the jitter, in training only (S·M draws; saved for backward with the jittered input). Parameters:
    `weight_EM` [E, M]. Losses: "balance" (as in the paper), "z".

    Args:
        jitter: 0 ≤ jitter < 1; 0 disables it.
    """

    # "importance_load" needs noise on the logits; Switch jitters x.
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
        # In float32: x is not rounded to half precision again.
        for factor_SM in drawn:
            x_SM = x_SM * factor_SM
        return super().score(x_SM)


class BatchPrioritised(TopK):
    """Top-k gate that keeps the most confident tokens first (Riquelme et al. 2021, V-MoE, algorithm 2).

    Like `TopK` with `priority_S` = max_e p_e: a full expert drops the tokens with the lowest priority instead of the
    last tokens. V-MoE uses `noise` = 1 and unnormalized weights (the default here). Random, parameters, losses: as in
    `TopK`.
    """

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

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        # Overriding `route` makes the gate unsplittable: dropping depends on all tokens of the rank.
        routing = super().route(x_SM)
        assert isinstance(routing, Routing)
        # The first unnormalized weight is the highest probability, unless experts were given.
        if self.normalizes or active_override() is not None:
            assert routing.logits_SE is not None
            priority_S = routing.logits_SE.softmax(1).amax(1)
        else:
            priority_S = routing.weight_SK.detach()[:, 0]
        return dataclasses.replace(routing, priority_S=priority_S)


class GShard(TopK):
    """Noisy top-k with learned noise (Shazeer et al. 2017, eq. 3–5; called GShard in FSMoE §2.1).

    h = x·W_gᵀ + N(0,1)·softplus(x·W_noiseᵀ), weight = softmax(KeepTopK(h, k)), where KeepTopK sets all but the k
    highest to −∞; ties by lower index. With k = 1 the weight is the constant 1 and only auxiliary losses train the
    router: use `Switch`.

    Random: the noise, in training only (one draw per token and expert); in evaluation h = x·W_gᵀ. Parameters:
    `weight_EM` [E, M]; `noise_weight_EM` [E, M], initially zero as in the paper (a standard deviation of ln 2). Losses:
    "balance" (softmax over all of h; counts all k choices), "importance_load" (as in the paper: importance from the
    weights, load from the learned noise), "z" (of h).
    """

    noise_weight_EM: nn.Parameter

    def __init__(
        self, experts: int, k: int = 2, capacity_factor: float | None = None, *, aux: Mapping[str, float] | None = None
    ) -> None:
        # `noise` is a factor on the learned noise.
        super().__init__(experts, k, capacity_factor, noise=1.0, aux=aux)

    @property
    def normalizes(self) -> bool:
        return True

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim), "noise_weight_EM": (self.experts, model_dim)}

    def reset_parameters(self) -> None:
        fill_normal(self.weight_EM, INIT_STD)
        # softplus(0) = ln 2: initially all experts explore equally.
        nn.init.zeros_(self.noise_weight_EM)

    @property
    def one_kernel(self) -> bool:
        return False  # the noise has its own matrix

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Return, in training or for the loss, noise-free logits and the noise's deviation; always noisy logits."""
        if self.training or "importance_load" in self.aux:
            # A single GEMM reads x and writes its gradient once.
            both = router_logits(x_SM, torch.cat((self.weight_EM, self.noise_weight_EM)))
            clean_SE, raw_SE = both.split(self.experts, dim=1)
            std_SE = nn.functional.softplus(raw_SE)
            noisy_SE = clean_SE + drawn[0] * std_SE if drawn else clean_SE
            return clean_SE, std_SE, noisy_SE
        return (router_logits(x_SM, self.weight_EM),)

    def _importance_load(self, scores: tuple[Tensor, ...], expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        clean_SE, std_SE, noisy_SE = scores
        gate_SE = torch.zeros_like(noisy_SE).scatter(1, expert_SK, weight_SK)
        return noisy_load_importance(gate_SE, clean_SE, noisy_SE, std_SE.clamp(min=_MIN_STD), self.k)


class XMoE(TopK):
    """Cosine similarity of low-dimensional token projections and expert embeddings (Chi et al. 2022, X-MoE, eq. 5–7).

    s_e = cos(W_proj·x, w_e) / τ, p = softmax(s); then as in `TopK` without noise. Vectors shorter than 1e-4 (all-zero
    tokens) are not normalized, to bound their gradient. τ is learned as log(1/τ), with 1/τ ≤ 100.

    Losses: "balance" (counts all k choices), "z". Parameters: `proj_PM` [P, M] normal with standard deviation 1/√M;
    `expert_EP` [E, P] normal (only its direction matters); `log_scale` [1].

    Args:
        proj_dim: P, dimension of the projections (the authors' code uses 16).
        temperature: initial τ, at least 0.01.
    """

    # "importance_load" needs noise, which the paper does not use.
    losses: ClassVar[tuple[str, ...]] = ("balance", "z")
    proj_PM: nn.Parameter
    expert_EP: nn.Parameter
    log_scale: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 1,
        capacity_factor: float | None = None,
        *,
        proj_dim: int = 16,
        temperature: float = 0.3,
        normalize: bool = True,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, normalize=normalize, aux=aux)
        check_count(self, "proj_dim", proj_dim)
        self.require(0.01 <= temperature < math.inf, f"temperature must be at least 0.01 and finite, got {temperature}")
        self.proj_dim = proj_dim
        self.temperature = temperature

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {
            "proj_PM": (self.proj_dim, model_dim),
            "expert_EP": (self.experts, self.proj_dim),
            "log_scale": (1,),  # not a scalar: FSDP shards dimension 0
        }

    def reset_parameters(self) -> None:
        fill_normal(self.proj_PM, self.proj_PM.shape[1] ** -0.5)
        fill_normal(self.expert_EP, INIT_STD)
        nn.init.constant_(self.log_scale, -math.log(self.temperature))

    @property
    def one_kernel(self) -> bool:
        return False  # logits are cosines, not x·Wᵀ

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        token_SP = unit_vectors(router_logits(x_SM, self.proj_PM), dim=1)
        expert_EP = unit_vectors(self.expert_EP.to(token_SP.dtype), dim=1)
        scale = self.log_scale.to(token_SP.dtype).clamp(max=_MAX_LOG_SCALE).exp()
        return (router_logits(token_SP, expert_EP) * scale,)


def noisy_load_importance(
    gate_SE: Tensor, clean_SE: Tensor, noisy_SE: Tensor, noise_std: Tensor | float, k: int
) -> Tensor:
    """Compute `load_importance_loss` with Shazeer's threshold: the k-th highest noisy logit of the other experts.

    All tensors are [S, E].
    """
    E = clean_SE.shape[1]
    # All experts are selected, so the load is even and no other expert defines a threshold.
    if k == E:
        return load_importance_loss(gate_SE, clean_SE.detach(), clean_SE.detach(), 1.0)
    # The threshold of a selected expert is the (k+1)-th value, that of another expert the k-th.
    best_SK = top_experts(noisy_SE, k + 1)
    value_SK = noisy_SE.gather(1, best_SK)
    chosen_SE = torch.zeros_like(noisy_SE, dtype=torch.bool).scatter_(1, best_SK[:, :k], True)
    threshold_SE = torch.where(chosen_SE, value_SK[:, k:], value_SK[:, k - 1 : k])
    return load_importance_loss(gate_SE, clean_SE, threshold_SE, noise_std)


# CPU, 8192 tokens, k passes of max / one stable sort: 0.3 / 0.8 ms for 8 experts, k = 2; 45 / 165 ms for 512 experts,
# k = 16.
_MAX_PASSES = 32


def top_experts(score_SE: Tensor, k: int) -> Tensor:
    """Return the k highest columns of each row, highest first, ties by lower column.

    Unlike the order of `torch.topk`, this order is equal on all devices. Not differentiable. Example: score [[1, 3, 3,
    2]], k = 3 gives [[1, 2, 3]].

    Args:
        score_SE: [S, E] float or int64; k ≤ E. NaN counts as the highest score and -inf as the lowest finite one, so
            the k columns of a row are always distinct and in range.

    Returns:
        [S, k] int64.
    """
    score_SE = score_SE.detach()
    choice = None if torch.compiler.is_compiling() else THREAD_STATE.override
    if choice is not None and choice.is_selection(score_SE):
        return choice.select(score_SE, k, lambda: _top_by_max(score_SE, k))
    return _top_by_max(score_SE, k)


def _top_by_max(score_SE: Tensor, k: int) -> Tensor:
    if k > _MAX_PASSES:
        return score_SE.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if score_SE.is_floating_point():
        taken: float = -torch.inf
        lowest: float = torch.finfo(score_SE.dtype).min
    else:
        taken = torch.iinfo(score_SE.dtype).min
        lowest = taken + 1
    left_SE = score_SE.clamp(min=lowest)  # a copy, in which every value exceeds `taken`
    chosen = []
    for choice in range(k):
        best_S1 = left_SE.max(dim=1, keepdim=True).indices  # documented: the first of equal maxima
        chosen.append(best_S1)
        if choice + 1 < k:
            # Below the clamp: not selected again.
            left_SE.scatter_(1, best_S1, taken)
    return torch.cat(chosen, dim=1)


def gather_selected(score_SE: Tensor, expert_SK: Tensor) -> Tensor:
    """Gather the scores of selected experts. Unlike `Tensor.gather`, saves only the indices for backward."""
    shape = score_SE.shape
    return linear(
        score_SE,
        lambda score: score.gather(1, expert_SK),
        lambda grad: grad.new_zeros(shape).scatter_add(1, expert_SK, grad),
        "the scores of chosen experts",
    )
