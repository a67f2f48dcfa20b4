"""Expert Choice: the experts pick the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.layers.gates.base import Gate, Routing, share_of_rows
from fusedmoe.layers.gates.router import router_logits
from fusedmoe.losses import z_loss


class ExpertChoice(Gate):
    """Each expert takes its ceil(k·f·S/E) most probable tokens, at most S (Zhou et al. 2022, Expert Choice).

    p = softmax over experts of x·Wᵀ; expert e picks the tokens with the highest p[:, e], the lower token
    between equal ones; the weight is p. Every expert gets the same number of tokens, and a token gets 0 to E
    experts, k·f on average. The choice looks at the whole batch, later tokens included: not for causal
    language models.

    ``Routing`` has K = E slots: slot e holds expert e, or -1 (weight 0) where e did not pick the token. Its
    capacity is None, as nothing is left to drop; the attribute ``capacity_factor`` of this gate is therefore
    None and f is kept as ``factor``.

    Random: nothing. Parameters: ``weight_EM`` [E, M]. Losses: "z". Default: none, the load is even by
    construction.

    Args:
        k: experts per token on average (times the factor).
        capacity_factor: f > 0.
    """

    needs_whole_batch: ClassVar[bool] = True
    losses: ClassVar[tuple[str, ...]] = ("z",)
    weight_EM: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 2,
        capacity_factor: float = 1.0,
        *,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, aux=aux)
        self.require(capacity_factor is not None, "capacity_factor sets how many tokens an expert picks: give one")
        self.factor = capacity_factor
        self.capacity_factor = None

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    def picks(self, tokens: int) -> int:
        """Tokens that each expert picks out of ``tokens``."""
        return min(share_of_rows(self.k, self.factor, tokens, self.experts), tokens)

    def rows_per_token(self, tokens: int) -> float:
        return self.experts * self.picks(tokens) / tokens

    def route(self, x_SM: Tensor) -> Routing:
        S, E = x_SM.shape[0], self.experts
        logits_SE = router_logits(x_SM, self.weight_EM)
        prob_SE = logits_SE.softmax(1)
        chosen_SE = _highest_rows(prob_SE.detach(), self.picks(S))
        expert_E = torch.arange(E, device=x_SM.device)
        return Routing(
            expert_SK=torch.where(chosen_SE, expert_E, -1),
            weight_SK=prob_SE.masked_fill(~chosen_SE, 0),
            capacity=None,
            priority_S=None,
            aux_loss=self.weigh(logits_SE, {"z": lambda: z_loss(logits_SE)}),
            logits_SE=logits_SE.detach(),
        )


def _highest_rows(score_SE: Tensor, count: int) -> Tensor:
    """Mask [S, E] of the ``count`` highest rows of each column, lower rows first between equal scores.

    Only the set matters, so that the count-th value and a running count of its equals do instead of a stable
    sort.
    """
    if count == 0:
        return torch.zeros_like(score_SE, dtype=torch.bool)
    score_ES = score_SE.t().contiguous()
    least_E1 = score_ES.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above_ES = score_ES > least_E1
    equal_ES = score_ES == least_E1
    wanted_E1 = count - above_ES.sum(1, keepdim=True)
    return (above_ES | (equal_ES & (equal_ES.cumsum(1) <= wanted_E1))).t()
