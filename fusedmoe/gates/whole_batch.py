"""Whole-batch gates: Expert Choice, where experts select tokens, and SoftMoE, which mixes tokens into slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.gates.base import (
    Gate,
    Routing,
    SoftRouting,
    check_count,
    fill_normal,
    router_dtype,
    router_logits,
    rows_per_expert,
    unit_vectors,
)
from fusedmoe.losses import z_loss


class ExpertChoice(Gate):
    """Each expert selects its ceil(k·f·S/E) most probable tokens, at most S (Zhou et al. 2022, Expert Choice).

    p = softmax over experts of x·Wᵀ; expert e selects the tokens with the highest p[:, e], ties by lower token index;
    the weight is p. Each expert gets the same number of tokens, and a token gets 0 to E experts, k·f on average. The
    choice depends on the whole batch, including later tokens: not for causal language models.

    `Routing` has K = E slots: slot e is expert e, or -1 (weight 0) if e did not select the token. Nothing is dropped,
    so its capacity and this gate's attribute `capacity_factor` are None; f is stored as `factor`.

    Parameters: `weight_EM` [E, M]. Losses: "z". Default: none.

    Args:
        k: average experts per token (times the factor).
        capacity_factor: f > 0.
    """

    losses: ClassVar[tuple[str, ...]] = ("z",)
    weight_EM: nn.Parameter

    def __init__(
        self, experts: int, k: int = 2, capacity_factor: float = 1.0, *, aux: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)
        self.require(
            capacity_factor is not None, "capacity_factor determines how many tokens an expert selects: pass one"
        )
        self.factor = capacity_factor
        self.capacity_factor = None

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    def picks(self, tokens: int) -> int:
        return min(rows_per_expert(self.k, self.factor, tokens, self.experts), tokens)

    def rows_per_token(self, tokens: int) -> float:
        return self.experts * self.picks(tokens) / tokens

    def route(self, x_SM: Tensor) -> Routing:
        S, E = x_SM.shape[0], self.experts
        logits_SE = router_logits(x_SM, self.weight_EM)
        prob_SE = logits_SE.softmax(1)
        chosen_SE = _highest_rows(prob_SE.detach(), self.picks(S))
        expert_E = torch.arange(E, device=x_SM.device)
        weight_SK = prob_SE.masked_fill(~chosen_SE, 0)
        return self.routing(
            torch.where(chosen_SE, expert_E, -1), weight_SK, logits_SE, {"z": lambda: z_loss(logits_SE)}
        )


class SoftMoE(Gate):
    """Soft dispatch and combine without dropping (Puigcerver et al. 2024, From Sparse to Soft, eq. 1–3 and §2.3).

    logits = l2norm(x) · (scale · l2norm(Φ)) [S, N], N = E·slots; dispatch = softmax over tokens (dimension 0), combine
    = softmax over slots (dimension 1). Vectors shorter than 1e-4 (all-zero tokens) are not normalized, to bound their
    gradients. Without `normalize` the logits are x·Φ. Column n belongs to expert n // slots. Each slot mixes all S
    tokens of the rank, including later ones: not for causal language models.

    Parameters: `weight_NM` [E·slots, M] normal with standard deviation 1/√M; with `normalize`, `scale`
    [1], initially one. Losses: "z" (on the [S, N] logits). Default: none.

    Args:
        slots: p ≥ 1, inputs per expert.
        normalize: l2-normalize tokens and slot parameters (matters for large model dimensions).
    """

    losses: ClassVar[tuple[str, ...]] = ("z",)
    weight_NM: nn.Parameter
    scale: nn.Parameter

    def __init__(
        self, experts: int, slots: int = 1, *, normalize: bool = True, aux: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(experts, experts, None, aux=aux)
        check_count(self, "slots", slots)
        self.slots = slots
        self.normalize = normalize

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight_NM": (self.experts * self.slots, model_dim)}
        if self.normalize:
            shapes["scale"] = (1,)  # not a scalar: FSDP shards dimension 0
        return shapes

    def reset_parameters(self) -> None:
        fill_normal(self.weight_NM, self.weight_NM.shape[1] ** -0.5)
        if self.normalize:
            nn.init.ones_(self.scale)

    def route(self, x_SM: Tensor) -> SoftRouting:
        if self.normalize:
            x_SM = x_SM.to(router_dtype(x_SM))
            weight_NM = unit_vectors(self.weight_NM.to(x_SM.dtype), dim=1)
            # Scale Φ, N·M elements, instead of the logits, S·N.
            logits_SN = router_logits(unit_vectors(x_SM, dim=1), weight_NM * self.scale.to(x_SM.dtype))
        else:
            logits_SN = router_logits(x_SM, self.weight_NM)
        return SoftRouting(
            dispatch_SN=logits_SN.softmax(0),
            combine_SN=logits_SN.softmax(1),
            slots=self.slots,
            aux_loss=self.weigh(logits_SN, {"z": lambda: z_loss(logits_SN)}),
            logits_SE=logits_SN.detach(),
        )

    def row_capacity(self, tokens: int) -> int:
        return self.slots


def _highest_rows(score_SE: Tensor, count: int) -> Tensor:
    """Return a mask [S, E] of the `count` highest rows of each column, ties by lower row."""
    if count == 0:
        return torch.zeros_like(score_SE, dtype=torch.bool)
    # The count-th value and a running count of its ties replace a stable sort.
    score_ES = score_SE.t().contiguous()
    least_E1 = score_ES.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above_ES = score_ES > least_E1
    equal_ES = score_ES == least_E1
    wanted_E1 = count - above_ES.sum(1, keepdim=True)
    return (above_ES | (equal_ES & (equal_ES.cumsum(1) <= wanted_E1))).t()
