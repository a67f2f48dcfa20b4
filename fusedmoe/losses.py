"""Auxiliary losses of a router: pure functions of what a gate computed on one rank.

Each takes tensors with S tokens and E experts and returns a scalar tensor of the input's dtype. With S = 0 each is
zero, never NaN. Coefficients are the caller's (a gate's `aux` argument).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

__all__ = ["balance_loss", "load_importance_loss", "z_loss"]

# Keeps cv² finite when nothing was routed.
_MEAN_FLOOR = 1e-10


class Packing(NamedTuple):
    """The sequences of S tokens.

    Attributes:
        sequence_S: [S] int64 in [0, num_sequences), each token's sequence.
        num_sequences: number of sequences, empty ones included.
    """

    sequence_S: Tensor
    num_sequences: int

    def select(self, index: Tensor) -> Packing:
        """Return the sequences of the tokens at `index` alone. Sequences left without tokens are empty."""
        return self._replace(sequence_S=self.sequence_S.index_select(0, index))


def balance_loss(prob_SE: Tensor, expert_SK: Tensor, *, sequence: int | None = None) -> Tensor:
    """E · Σ_e mean_S(prob_e) · share_e: one when balanced, E when a single expert takes everything.

    `share_e` is the fraction of **all S·K choices** that went to expert e. With K = 1 this is the loss of Switch (Fedus
    et al. 2022, eq. 4); with K > 1 that of DeepSeek-V3. GShard's (Lepikhin et al. 2021, algorithm 1, also Tutel's)
    counts first choices only: pass `expert_SK[:, :1]` for it.

    Args:
        prob_SE: [S, E] probabilities, each row sums to one; the gradient flows through these only.
        expert_SK: [S, K] int64 choices before any drop; -1 (no expert) counts in the denominator only.
        sequence: tokens per sequence; the loss is then taken in each sequence and averaged over them
            (DeepSeek-V3, eq. 17–20). None: over all S tokens at once.

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
    # Integer counts: the order of the additions cannot change them. Column 0 collects the -1 of empty slots.
    column_BN = (expert_SK + 1).reshape(B, length * K)
    count_BE = torch.zeros(B, E + 1, dtype=torch.int64, device=prob_SE.device)
    count_BE.scatter_add_(1, column_BN, torch.ones_like(column_BN))
    # Of no tokens it is zero, with a graph: every rank has one. (A compiler may not know whether there are any.)
    share_BE = count_BE[:, 1:].to(prob_SE.dtype) / max(length * K, 1)
    mean_BE = prob_SE.reshape(B, length, E).sum(1) / max(length, 1)
    loss = E * (mean_BE * share_BE).sum()
    return loss if sequence is None else loss / max(B, 1)


def packed_balance_loss(prob_SE: Tensor, expert_SK: Tensor, packing: Packing) -> Tensor:
    """`balance_loss` of each packed sequence, averaged over the sequences that have tokens, each with weight one.

    Args:
        prob_SE, expert_SK: see `balance_loss`.
    """
    sequence_S, num_sequences = packing
    (S, E), K = prob_SE.shape, expert_SK.shape[1]
    length_B = torch.zeros(num_sequences, dtype=torch.int64, device=prob_SE.device)
    length_B.scatter_add_(0, sequence_S, torch.ones_like(sequence_S))
    # Column 0 collects the -1 of empty slots.
    pair_N = (sequence_S[:, None] * (E + 1) + expert_SK + 1).reshape(S * K)
    count_BE = torch.zeros(num_sequences * (E + 1), dtype=torch.int64, device=prob_SE.device)
    count_BE = count_BE.scatter_add_(0, pair_N, torch.ones_like(pair_N)).view(num_sequences, E + 1)[:, 1:]
    num_filled = (length_B > 0).sum().clamp(min=1)
    # Σ/length is the mean, count/(length·K) the share. Lengths are squared as floats.
    length_B1 = length_B.clamp(min=1).to(prob_SE.dtype)[:, None]
    weight_BE = count_BE.to(prob_SE.dtype) * (E / K) / (length_B1 * length_B1 * num_filled)
    # Sums over tokens in one fixed order; `index_add` of the probabilities would not have one on CUDA.
    return (prob_SE * weight_BE.index_select(0, sequence_S)).sum()


def balance_loss_of_sums(score_BE: Tensor, count_BE: Tensor, tokens: int, k: int) -> Tensor:
    """`balance_loss` from sums over the tokens of each of B sequences, as a gate's kernel makes them.

    The definition says mean and share; here all divisions are one factor, which spares two passes over [B, E].

    Args:
        score_BE: Σ of the probabilities, differentiable.
        count_BE: choices of each expert.
        tokens: S, of all sequences; k: choices of a token.
    """
    B, E = score_BE.shape
    length = tokens // B
    # Σ/length is the mean, count/(length·k) the share; the mean over B sequences is the last division.
    return (score_BE * count_BE).sum() * (E / max(B * length * length * k, 1))


def load_importance_loss(gate_SE: Tensor, clean_SE: Tensor, threshold: Tensor, noise_std: Tensor | float) -> Tensor:
    """(cv²(importance) + cv²(load)) / 2 of a noisy top-k gate (Shazeer et al. 2017, appendix A).

    importance_e = Σ_S gate_e, and load_e = Σ_S Φ((clean_e − threshold) / noise_std) is the smooth count of the tokens
    that would choose e if e's noise were drawn again. cv² is the unbiased variance over the squared mean, as in Tutel;
    of a single expert it is zero.

    Args:
        gate_SE: [S, E] gate values.
        clean_SE: [S, E] logits without noise.
        threshold: [S, E] or [S, 1], the noisy logit that an expert has to exceed to be chosen.
        noise_std: standard deviation of the noise, a positive number or a tensor that broadcasts to [S, E].

    Raises:
        ConfigError: `noise_std` is a number that is not positive.
    """
    if not isinstance(noise_std, Tensor) and not noise_std > 0:
        raise ConfigError(f"load-and-importance loss: noise_std must be positive, got {noise_std}")
    # Φ of the distance to the threshold: the chance that a new draw of the noise would choose the expert.
    load_SE = torch.special.ndtr((clean_SE - threshold) / noise_std)
    return (_cv_squared(gate_SE.sum(0)) + _cv_squared(load_SE.sum(0))) / 2


def z_loss(logits_SE: Tensor) -> Tensor:
    """mean_S(logsumexp_E(logits)²): keeps router logits small (Zoph et al. 2022, ST-MoE, eq. 5).

    Args:
        logits_SE: [S, E] router logits.
    """
    return z_loss_of_sums(logsumexp_of_rows(logits_SE))


def z_loss_of_sums(logsumexp_S: Tensor) -> Tensor:
    """`z_loss` from the logsumexp of each token's logits."""
    return logsumexp_S.square().sum() / max(logsumexp_S.shape[0], 1)


def logsumexp_of_rows(logits_SE: Tensor) -> Tensor:
    """`logits_SE.logsumexp(1)`, also in a graph that does not know how many tokens there are."""
    if not torch.compiler.is_compiling():
        return logits_SE.logsumexp(1)
    # PyTorch's own asks for that. The highest logit, less the logarithm of its probability, is the same.
    return logits_SE.amax(1) - logits_SE.log_softmax(1).amax(1)


def _cv_squared(total_E: Tensor) -> Tensor:
    # The unbiased variance of one number is undefined.
    if total_E.shape[0] == 1:
        return total_E.sum() * 0
    # The floor only matters where nothing was routed; then the loss is zero, not NaN.
    return total_E.var() / (total_E.mean().square() + _MEAN_FLOOR)
