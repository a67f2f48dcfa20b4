"""Rotary positions (RoFormer, Su et al. 2021, eq. 34): pairs of channels turn by an angle that grows with position."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 10000.0


def rotary_angles(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles, both [length, head_dim / 2], computed in float64."""
    turn = _BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angle_LD = torch.arange(length, device=device, dtype=torch.float64)[:, None] * turn
    return angle_LD.cos().to(dtype), angle_LD.sin().to(dtype)


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Turns channel i together with channel i + D/2, position by position; same shape and dtype."""
    left, right = x_BHLD.chunk(2, dim=-1)
    return torch.cat((left * cos_LD - right * sin_LD, right * cos_LD + left * sin_LD), dim=-1).to(x_BHLD.dtype)
