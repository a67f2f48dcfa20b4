"""Results of a gate by its logits, as data (`GateRule`, `GateChoice`) and as a definition in plain torch.

Worked example: logits [[1, 3, 3, 2]], k = 2, softmax, normalised. Between equals the lower expert wins, so the experts
are [1, 2] and the weights [½, ½]. The statistics are the sums over tokens of p = softmax(logits) and of the choices,
here [0, 1, 1, 0]; logsumexp is ln(e + 2e³ + e²).
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
# What the Triton kernels take, and are compiled for.
MOST_EXPERTS = 512
MOST_CHOSEN = 16
# A smaller sum of scores counts as one where it divides: the gradient of 1/sum would overflow.
LEAST_SUM = 1e-20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GateRule:
    """The rule by which the experts of a token follow from its logits.

    The score of an expert is softmax(logits)_e, σ(logit_e), or the logit itself ("none": non-negative scores given as
    they are). The k experts with the highest logits are chosen, or with a bias those with the highest score + bias;
    NaN comes first, and between equals the lower expert. Weight: `scale` times the score of the chosen, with
    `normalize` divided by the sum of the scores chosen (`share_of_sum`).

    Attributes:
        k: experts of a token, at least 1.
        score: one of `SCORES`.
        normalize: divide by the sum over the chosen experts. For softmax this is the softmax over the chosen logits.
        scale: factor on the weights.
        statistics: give the sums of shares and of choices (see `GateChoice`).
        sequence: tokens over which those are summed, a divisor of S; None for all S.
        logsumexp: give the logsumexp of each token's logits.

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
        """B, the number of sequences in S tokens; 1 for no tokens.

        Raises:
            ConfigError: S is not a multiple of `sequence`.
        """
        if self.sequence is None:
            return 1
        if tokens % self.sequence:
            raise ConfigError(f"gate: {tokens} tokens do not divide into sequences of {self.sequence}")
        return max(tokens // self.sequence, 1)


class GateChoice(NamedTuple):
    """A gate's results for S tokens in B sequences; float32 (float64 for float64 input) unless said otherwise.

    Attributes:
        expert_SK: int64 in [0, E), best first, distinct in a row.
        weight_SK: differentiable.
        logits_SE: detached.
        score_BE: Σ over a sequence's tokens of their share of each expert, differentiable: the softmax, or the score
            divided by its sum over all experts (sigmoid), or the score ("none"). None if not asked for.
        count_BE: tokens of a sequence that chose each expert, as floats (exact up to 2²⁴). None if not asked for.
        logsumexp_S: differentiable. None if not asked for.
        bad: tokens without a right choice (`count_bad`), an int64 scalar. None where plain torch made the choice.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    logits_SE: Tensor
    score_BE: Tensor | None
    count_BE: Tensor | None
    logsumexp_S: Tensor | None
    bad: Tensor | None = None


def has_kernels(*tensors: Tensor) -> bool:
    """Returns whether the Triton kernels serve such tensors; float64 is left to plain torch."""
    return all(uses_triton(tensor) and tensor.dtype in _DTYPES for tensor in tensors)


def fits_kernels(experts: int, k: int) -> bool:
    """Returns whether the choosing kernels are made for these sizes; the rest is left to plain torch."""
    return k <= experts <= MOST_EXPERTS and k <= MOST_CHOSEN


def summands_shape(tokens: int, experts: int) -> tuple[int, int, int]:
    """The shape of dlogits as two bfloat16 summands, [2, S, E], E rounded up to 16: rows are copied in one piece."""
    return 2, tokens, -(-experts // 16) * 16


def define_choice(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None = None) -> GateChoice:
    """The definition, differentiable, in the logits' dtype; also what serves where Triton does not."""
    # By logits, not scores, where nothing is added: a softmax may round different logits to the same score.
    score_SE = logits_SE
    if rule.score != "none":
        score_SE = logits_SE.softmax(1) if rule.score == "softmax" else logits_SE.sigmoid()
    by_SE = logits_SE.detach() if bias_E is None else score_SE.detach() + bias_E.to(score_SE.dtype)
    by_SE = by_SE.masked_fill(by_SE.isnan(), math.nan)  # on CUDA a NaN with its sign bit set would come last
    expert_SK = by_SE.sort(dim=1, descending=True, stable=True).indices[:, : rule.k].contiguous()
    if rule.score == "softmax" and rule.normalize:
        weight_SK = logits_SE.gather(1, expert_SK).softmax(1)  # p / Σp of the chosen, without the underflow of p
    else:
        weight_SK = score_SE.gather(1, expert_SK)
        if rule.normalize:
            weight_SK = share_of_sum(weight_SK)
    score_BE = count_BE = None
    if rule.statistics:
        S, E = logits_SE.shape
        B = rule.sequences(S)
        # Shares of a token sum to one, as the balance loss wants them: sigmoids do not by themselves.
        share_SE = share_of_sum(score_SE) if rule.score == "sigmoid" else score_SE
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


def count_bad(logits_SE: Tensor) -> Tensor:
    """Counts the tokens without a right choice, an int64 scalar: a logit is NaN or +inf, or all are −inf.

    −inf rules an expert out; where all of a token's are, there is nothing to choose.
    """
    return (~logits_SE.amax(1).isfinite()).sum()


def share_of_sum(score_SN: Tensor) -> Tensor:
    """Divide non-negative scores [S, N] by the sum of their row; a sum below `LEAST_SUM` counts as one.

    All sigmoids of a token may underflow. Its shares are zero then, and gradients of scores are those of the shares.
    """
    total_S1 = score_SN.sum(1, keepdim=True)
    return score_SN / torch.where(total_S1 < LEAST_SUM, 1.0, total_S1)
