"""Top-k gate: experts, weights and load statistics from router logits, with a reference in plain PyTorch.

Example: logits [[1, 3, 3, 2]], k = 2, softmax, normalized. Ties select the lower index: experts [1, 2], weights [½, ½].
The statistics are sums over tokens of p = softmax(logits) and of the one-hot choices, here [0, 1, 1, 0]; logsumexp is
ln(e + 2e³ + e²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import uses_triton

SCORES = ("softmax", "sigmoid", "none")
# Limits of the Triton kernels.
MAX_EXPERTS = 512
MAX_TOP_K = 16
# Smaller sums do not divide scores: the gradient of 1/sum would overflow.
MIN_SUM = 1e-20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GateRule:
    """Rule that selects a token's experts and weights from its logits.

    The score of expert e is softmax(logits)_e, σ(logit_e), or the logit itself ("none", for non-negative scores). The k
    experts with the highest logits are selected; with a selection bias, the highest score + bias. NaN sorts first; ties
    select the lower expert index.

    Attributes:
        normalize: divide the weights by their sum (`normalize_by_sum`); softmax is then taken over the selected logits.
        scale: factor on the weights.
        statistics: return `GateChoice.score_BE` and `GateChoice.count_BE`.
        sequence: tokens per sequence for the statistics, a divisor of S; None: all S tokens are one sequence.
        logsumexp: return the logsumexp of each token's logits.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    statistics: bool = False
    sequence: int | None = None
    logsumexp: bool = False

    def __post_init__(self) -> None:
        for name in ("k",) if self.sequence is None else ("k", "sequence"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"gate: {name} must be an integer of at least 1, got {value!r}")
        if not math.isfinite(self.scale):
            raise ConfigError(f"gate: scale must be finite, got {self.scale}")
        if self.score not in SCORES:
            raise ConfigError(f"gate: unknown score {self.score!r}; choose one of {', '.join(SCORES)}")

    def sequences(self, tokens: int) -> int:
        """Return the number of sequences in S tokens, at least 1. ConfigError if `sequence` does not divide S."""
        if self.sequence is None:
            return 1
        if tokens % self.sequence:
            raise ConfigError(f"gate: {tokens} tokens do not divide into sequences of {self.sequence}")
        return max(tokens // self.sequence, 1)


class GateChoice(NamedTuple):
    """Gate results for S tokens in B sequences; float32 (float64 for float64 input) unless noted.

    Attributes:
        expert_SK: int64 in [0, E), highest first, distinct within a token.
        weight_SK: differentiable.
        logits_SE: detached.
        score_BE: sum over a sequence's tokens of their share of each expert, differentiable. The share is the softmax,
            the sigmoid score divided by its sum over all experts, or the score itself ("none").
        count_BE: number of a sequence's tokens that selected each expert, as floats (exact up to 2²⁴).
        logsumexp_S: differentiable. Like both sums, None unless requested.
        bad: number of tokens without a valid choice (`count_invalid`), int64 scalar. None from the plain PyTorch path.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    logits_SE: Tensor
    score_BE: Tensor | None
    count_BE: Tensor | None
    logsumexp_S: Tensor | None
    bad: Tensor | None = None


def has_kernels(*tensors: Tensor) -> bool:
    return all(uses_triton(tensor) and tensor.dtype in _DTYPES for tensor in tensors)


def fits_kernels(experts: int, k: int) -> bool:
    """Return whether the top-k kernels support these sizes; larger ones run in plain PyTorch."""
    return k <= experts <= MAX_EXPERTS and k <= MAX_TOP_K


def summands_shape(tokens: int, experts: int) -> tuple[int, int, int]:
    """Return [2, S, E'], the shape of dlogits as two bfloat16 summands; E' is E padded to 16 for vectorized copies."""
    return 2, tokens, -(-experts // 16) * 16


def define_choice(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """Reference for the gate: differentiable, in the logits' dtype. Also runs where Triton does not apply."""
    # Without a bias, sort by logits: softmax may round different logits to equal scores.
    score_SE = logits_SE
    if rule.score != "none":
        score_SE = logits_SE.softmax(1) if rule.score == "softmax" else logits_SE.sigmoid()
    sort_key_SE = logits_SE.detach() if bias_E is None else score_SE.detach() + bias_E.to(score_SE.dtype)
    sort_key_SE = sort_key_SE.masked_fill(sort_key_SE.isnan(), math.nan)  # CUDA sorts a negative NaN last
    expert_SK = sort_key_SE.sort(dim=1, descending=True, stable=True).indices[:, : rule.k].contiguous()
    if rule.score == "softmax" and rule.normalize:
        weight_SK = logits_SE.gather(1, expert_SK).softmax(1)  # p / Σp without underflow of p
    else:
        weight_SK = score_SE.gather(1, expert_SK)
        if rule.normalize:
            weight_SK = normalize_by_sum(weight_SK)
    score_BE = count_BE = None
    if rule.statistics:
        S, E = logits_SE.shape
        B = rule.sequences(S)
        # The balance loss needs shares with sum one per token, unlike sigmoid scores.
        share_SE = normalize_by_sum(score_SE) if rule.score == "sigmoid" else score_SE
        score_BE = share_SE.view(B, S // B, E).sum(1)
        count_BE = torch.zeros_like(score_SE).scatter(1, expert_SK, 1).view(B, S // B, E).sum(1)
    return GateChoice(
        expert_SK,
        weight_SK * rule.scale,
        logits_SE.detach(),
        score_BE,
        count_BE,
        logits_SE.logsumexp(1) if rule.logsumexp else None,
    )


def count_invalid(logits_SE: Tensor) -> Tensor:
    """Count tokens without a valid choice (int64 scalar): a logit is NaN or +inf, or all are −inf."""
    return (~logits_SE.amax(1).isfinite()).sum()


def normalize_by_sum(score_SN: Tensor) -> Tensor:
    """Divide non-negative scores [S, N] by their row sum, or by one if the sum is below `MIN_SUM`.

    If all sigmoids of a token underflow, its shares are zero and the gradient passes to the scores unchanged.
    """
    total_S1 = score_SN.sum(1, keepdim=True)
    return score_SN / torch.where(total_S1 < MIN_SUM, 1.0, total_S1)
