"""Random routings."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(tokens: int, slots: int, experts: int, empty: float = 0.0) -> Tensor:
    """Choose random distinct experts for each token, with empty slots at random and beyond the number of experts."""
    expert_SK = torch.full((tokens, slots), -1)
    chosen = torch.rand(tokens, experts).argsort(1)[:, :slots]
    expert_SK[:, : chosen.shape[1]] = chosen
    expert_SK[torch.rand(tokens, slots) < empty] = -1
    return expert_SK
