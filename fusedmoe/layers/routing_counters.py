"""Sums of a layer's routing between two collections of metrics, kept where its tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.losses import balance_loss_of_sums

#: What is added up beside the numbers of experts: tokens, and over them the gate's losses; tokens with logits, and
#: over them entropy, squared logsumexp and balance loss. Losses are those of the tokens' forwards.
TERMS = ("tokens", "aux_loss", "scored", "entropy", "z_loss", "balance_loss")


class RoutingCounters:
    """Sums over the training forwards of one layer on this rank. Nothing here waits for the device.

    A forward costs a softmax over its logits, [S, E] in float32 for a moment, and some additions.

    Attributes:
        sums: [2·E + 6] float64: choices of each expert, how many of them got a row, and `TERMS`.
    """

    def __init__(self, experts: int, device: torch.device | str = "cpu") -> None:
        self.experts = experts
        self.sums = torch.zeros(2 * experts + len(TERMS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def choices(
        self, expert_SK: Tensor, chosen_E: Tensor, logits_SE: Tensor | None = None, aux_loss: Tensor | None = None
    ) -> None:
        """Adds the choices of another forward.

        Args:
            expert_SK: [S, K] of which the shape counts.   chosen_E: choices of each expert, drops included.
            logits_SE: of the router, if it has any.   aux_loss: the gate's weighted losses, a scalar.
        """
        if self.sums.device != chosen_E.device:  # the layer was moved
            self.sums = self.sums.to(chosen_E.device)
        S, K = expert_SK.shape
        chosen, _, tokens, aux, of_scores = self._parts()
        chosen.add_(chosen_E)
        tokens.add_(S)
        if aux_loss is not None:
            aux.add_(S * aux_loss)
        if logits_SE is None:
            return
        # All of these are sums over tokens, so that ranks and forwards of any size add up to means.
        logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
        prob_SE = logits_SE.softmax(1)
        balance = balance_loss_of_sums(prob_SE.sum(0).unsqueeze(0), chosen_E.unsqueeze(0), S, K)
        z = logits_SE.logsumexp(1).square().sum()
        of_scores.add_(torch.stack([torch.full_like(z, S), torch.special.entr(prob_SE).sum(), z, S * balance]))

    @torch.no_grad()
    def rows(self, kept_E: Tensor) -> None:
        """Adds the choices of a forward that got a row, of each expert."""
        self._parts()[1].add_(kept_E)

    def _parts(self) -> tuple[Tensor, ...]:
        return self.sums.split([self.experts, self.experts, 1, 1, len(TERMS) - 2])
