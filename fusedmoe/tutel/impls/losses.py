"""Tutel's auxiliary losses."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe import losses


def gshard_loss(scores_w_noise: Tensor, top_ids: Tensor) -> Tensor:
    """Return E · Σ_e mean_S(p_e) · the fraction of tokens whose *first* choice is e (Lepikhin et al. 2021).

    Args:
        scores_w_noise: [S, E] softmax of the (noisy) logits.
        top_ids: [S, K] choices, any integer dtype.
    """
    S, E = scores_w_noise.shape
    # Summed in Tutel's order, which matters in half precision.
    share_SE = torch.zeros_like(scores_w_noise).scatter_(1, top_ids[:, :1].long(), E / max(S, 1))
    return (scores_w_noise.sum(0) * share_SE.sum(0)).sum() / max(S, 1)


def load_importance_loss(
    scores_wo_noise: Tensor, topk_logits: Tensor, num_global_experts: int, gate_noise: float
) -> Tensor:
    """Return (cv²(importance) + cv²(load)) / 2, with Tutel's definition of the load.

    Args:
        scores_wo_noise: [S, E] softmax of the logits without noise.
        topk_logits: [S, K] noisy logits of the choices.
        gate_noise: positive, also in evaluation; the noise has standard deviation gate_noise / E.
    """
    # Tutel compares the softmax without noise with the noisy logit of the last choice; Shazeer et al. (2017) compare
    # logits with logits.
    scores, threshold = scores_wo_noise, topk_logits[:, -1:]
    if scores.dtype.itemsize < 4:
        scores, threshold = scores.float(), threshold.float()
    return losses.load_importance_loss(scores, scores, threshold, gate_noise / num_global_experts)
