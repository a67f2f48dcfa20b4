"""Cumulative counts of one-hot choices."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.errors import ConfigError


def torch_cumsum_sub_one(mask1: Tensor) -> Tensor:
    """Return the cumulative sum down each column, minus one."""
    return mask1.cumsum(0) - 1


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """Return `torch_cumsum_sub_one` of [T, E]; raise `ConfigError` for other dimensions."""
    if data.dim() != 2 or dim != 0:
        raise ConfigError(f"fast_cumsum_sub_one takes [T, E] along dimension 0, not {list(data.shape)} along {dim}")
    return torch_cumsum_sub_one(data)
