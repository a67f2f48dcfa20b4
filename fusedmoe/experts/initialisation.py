"""Initialisation of experts whose memory is there already, as after `to_empty` of a model made on the meta device."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fusedmoe.errors import ConfigError


def draw_seed() -> int:
    """Draw a seed, once whatever this rank holds: the default generator then stands at the same place on all ranks."""
    return int(torch.randint(2**62, (), device="cpu"))


@torch.no_grad()
def fill_again(experts: Any, dtype: torch.dtype | None, seed: int) -> None:
    """Fill parameters and buffers of experts by their own `make`, from this seed.

    Raises:
        ConfigError: before `setup`, experts that have changed owners, and experts with parametrisations, whose
            parameters have other names than those that `make` gives.
    """
    if experts.place is None or experts.moves and experts.own_numbers != tuple(experts.place.numbers):
        raise ConfigError(f"{type(experts).__name__}.reset_parameters: no experts yet, or experts that have moved")
    if any(map(is_parametrized, experts.modules())):
        raise ConfigError(
            f"{type(experts).__name__}.reset_parameters: the experts are parametrised (LoRA, weight norm); initialise "
            "them before"
        )
    tensors = dict(chain(experts.named_parameters(), experts.named_buffers()))
    # `make` belongs to a class, perhaps a user's: it runs on a copy, without a second copy of the parameters' memory.
    empty = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors.values()}
    memo = {key: nn.Parameter(one, one.requires_grad) if one.is_floating_point() else one for key, one in empty.items()}
    twin = deepcopy(experts, memo)
    with torch.device("cpu"):  # a factory of a user's makes modules on the default device
        twin.make(experts.model_dim, experts.place, seed, device="cpu", dtype=dtype)
    for name, value in chain(twin.named_parameters(), twin.named_buffers()):
        if not tensors[name].is_meta:
            tensors[name].copy_(value)
