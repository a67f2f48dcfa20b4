"""Auxiliary losses of a router: pure functions of one rank's gate outputs.

Each takes tensors with S tokens and E experts and returns a scalar tensor of the input's dtype, without coefficient.
With S = 0 the loss is zero, never NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

__all__ = ["balance_loss", "z_loss"]

_MEAN_FLOOR = 1e-10


class Packing(NamedTuple):
    """Assignment of S tokens to packed sequences.

    Attributes:
        sequence_S: [S] int64 in [0, num_sequences), each token's sequence.
        num_sequences: number of sequences, including empty sequences.
    """

    sequence_S: Tensor
    num_sequences: int

    def select(self, index: Tensor) -> Packing:
        """Return the packing of the tokens at `index`."""
        return self._replace(sequence_S=self.sequence_S.index_select(0, index))


def balance_loss(prob_SE: Tensor, expert_SK: Tensor, *, sequence: int | None = None) -> Tensor:
    """E · Σ_e mean_S(prob_e) · share_e: one when balanced, E when a single expert receives everything.

    `share_e` is the fraction of **all S·K choices** of expert e. With K = 1 this is the loss of Switch (Fedus et al.
    2022, eq. 4); with K > 1 that of DeepSeek-V3. For GShard's (Lepikhin et al. 2021, algorithm 1, also Tutel's), which
    counts first choices only, pass `expert_SK[:, :1]`.

    Args:
        prob_SE: [S, E] probabilities, each row sums to one; the gradient flows through these only.
        expert_SK: [S, K] int64 choices before any drop; -1 (no expert) counts in the denominator only.
        sequence: tokens per sequence. The loss is computed per sequence and averaged (DeepSeek-V3, eq. 17–20). None:
            one sequence of S tokens.

    Raises:
        ConfigError: S is not a multiple of `sequence`.
    """
    S, E = prob_SE.shape
    K = expert_SK.shape[1]
    B, length = 1, S
    if sequence is not None:
        if sequence < 1 or S % sequence:
            raise ConfigError(f"balance loss: {S} tokens do not divide into sequences of {sequence}")
        B, length = S // sequence, sequence
    # Integer counts do not depend on the order of additions. Column 0 collects the -1 of empty slots.
    column_BN = (expert_SK + 1).reshape(B, length * K)
    count_BE1 = torch.zeros(B, E + 1, dtype=torch.int64, device=prob_SE.device)
    count_BE1.scatter_add_(1, column_BN, torch.ones_like(column_BN))
    # `max`: zero without tokens, with a graph as on other ranks. (A compiler may not know the number of tokens.)
    share_BE = count_BE1[:, 1:].to(prob_SE.dtype) / max(length * K, 1)
    mean_BE = prob_SE.reshape(B, length, E).sum(1) / max(length, 1)
    loss = E * (mean_BE * share_BE).sum()
    return loss if sequence is None else loss / max(B, 1)


def packed_balance_loss(prob_SE: Tensor, expert_SK: Tensor, packing: Packing) -> Tensor:
    """Return `balance_loss` per packed sequence, averaged over the nonempty sequences with equal weights."""
    sequence_S, num_sequences = packing
    (S, E), K = prob_SE.shape, expert_SK.shape[1]
    length_B = torch.zeros(num_sequences, dtype=torch.int64, device=prob_SE.device)
    length_B.scatter_add_(0, sequence_S, torch.ones_like(sequence_S))
    # Column 0 collects the -1 of empty slots.
    pair_N = (sequence_S[:, None] * (E + 1) + expert_SK + 1).reshape(S * K)
    count = torch.zeros(num_sequences * (E + 1), dtype=torch.int64, device=prob_SE.device)
    count_BE = count.scatter_add_(0, pair_N, torch.ones_like(pair_N)).view(num_sequences, E + 1)[:, 1:]
    num_filled = (length_B > 0).sum().clamp(min=1)
    # Σ/length is the mean, count/(length·K) the share. Lengths are squared as floats.
    length_B1 = length_B.clamp(min=1).to(prob_SE.dtype)[:, None]
    weight_BE = count_BE.to(prob_SE.dtype) * (E / K) / (length_B1 * length_B1 * num_filled)
    # Deterministic sums over tokens, unlike `index_add` of probabilities on CUDA.
    return (prob_SE * weight_BE.index_select(0, sequence_S)).sum()


def balance_loss_of_sums(score_BE: Tensor, count_BE: Tensor, tokens: int, k: int) -> Tensor:
    """Return `balance_loss` from sums over the tokens of each of B sequences, as a gate's kernel computes them.

    Args:
        score_BE: sums of probabilities, differentiable.
        count_BE: number of choices per expert.
        tokens: S, over all sequences.
        k: choices per token.
    """
    B, E = score_BE.shape
    length = tokens // B
    # Σ/length is the mean, count/(length·k) the share. One factor has all divisions, which saves two passes over [B,
    # E].
    return (score_BE * count_BE).sum() * (E / max(B * length * length * k, 1))


def load_importance_loss(gate_SE: Tensor, clean_SE: Tensor, threshold: Tensor, noise_std: Tensor | float) -> Tensor:
    """(cv²(importance) + cv²(load)) / 2 of a noisy top-k gate (Shazeer et al. 2017, appendix A).

    importance_e = Σ_S gate_e. load_e = Σ_S Φ((clean_e − threshold) / noise_std) is the expected number of tokens that
    would choose e if its noise were redrawn. cv² is the unbiased variance over the squared mean, as in Tutel; zero for
    a single expert.

    Args:
        gate_SE: [S, E] gate values.
        clean_SE: [S, E] logits without noise.
        threshold: [S, E] or [S, 1], the noisy logit above which an expert is chosen.
        noise_std: standard deviation of the noise, a positive number or a tensor broadcastable to [S, E].

    Raises:
        ConfigError: `noise_std` is a number that is not positive.
    """
    if not isinstance(noise_std, Tensor) and not noise_std > 0:
        raise ConfigError(f"load-and-importance loss: noise_std must be positive, got {noise_std}")
    load_SE = torch.special.ndtr((clean_SE - threshold) / noise_std)
    return (_cv_squared(gate_SE.sum(0)) + _cv_squared(load_SE.sum(0))) / 2


def z_loss(logits_SE: Tensor) -> Tensor:
    """mean_S(logsumexp_E(logits)²): keeps router logits small (Zoph et al. 2022, ST-MoE, eq. 5)."""
    return z_loss_of_sums(logsumexp_of_rows(logits_SE))


def z_loss_of_sums(logsumexp_S: Tensor) -> Tensor:
    return logsumexp_S.square().sum() / max(logsumexp_S.shape[0], 1)


def logsumexp_of_rows(logits_SE: Tensor) -> Tensor:
    """Return `logsumexp` over experts, also in graphs with an unknown number of tokens."""
    if not torch.compiler.is_compiling():
        return logits_SE.logsumexp(1)
    # PyTorch's logsumexp specialises on the number of tokens. The highest logit minus its log-probability is equal.
    return logits_SE.amax(1) - logits_SE.log_softmax(1).amax(1)


def _cv_squared(total_E: Tensor) -> Tensor:
    if total_E.shape[0] == 1:
        return total_E.sum() * 0
    # Without routed tokens the floor makes the loss zero, not NaN.
    return total_E.var() / (total_E.mean().square() + _MEAN_FLOOR)
