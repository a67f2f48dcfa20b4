"""Reinitialisation of experts in existing memory, for example after `to_empty` of a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fusedmoe.errors import ConfigError


def draw_seed() -> int:
    """Draw a seed. Advances the default generator equally on all ranks, whichever experts they hold."""
    return int(torch.randint(2**62, (), device="cpu"))


def draw_linear(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Draw the parameters w1, w2, b1, b2 of one expert like `nn.Linear`: uniform in ±1/√fan_in. On the CPU."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    values = {name: torch.empty(tuple(shape), device="cpu") for name, shape in shapes.items()}
    for name, value in values.items():
        # fan_in is M for the up and H for the down projection.
        bound = shapes["w2"][0 if name in ("w1", "b1") else 1] ** -0.5
        value.uniform_(-bound, bound, generator=generator)
    return values


@torch.no_grad()
def reinitialise(experts: Any, dtype: torch.dtype | None, seed: int) -> None:
    """Refill parameters and buffers of experts with values from their own `make`, with this seed.

    Raises:
        ConfigError: before `setup`; for experts that have changed owners, or are parametrised.
    """
    if experts.place is None or experts.is_placed and experts.own_numbers != tuple(experts.place.numbers):
        raise ConfigError(f"{type(experts).__name__}.reset_parameters: no experts yet, or experts that have moved")
    if any(map(is_parametrized, experts.modules())):
        raise ConfigError(
            f"{type(experts).__name__}.reset_parameters: the experts are parametrised (LoRA, weight norm); initialise "
            "them before"
        )
    tensors = dict(chain(experts.named_parameters(), experts.named_buffers()))
    # `make` may be a user's: run it on a copy that shares the parameters' memory.
    empty = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors.values()}
    memo = {key: nn.Parameter(one, one.requires_grad) if one.is_floating_point() else one for key, one in empty.items()}
    twin = deepcopy(experts, memo)
    with torch.device("cpu"):  # a user's factory may use the default device
        twin.make(experts.model_dim, experts.place, seed, device="cpu", dtype=dtype)
    for name, value in chain(twin.named_parameters(), twin.named_buffers()):
        if not tensors[name].is_meta:
            tensors[name].copy_(value)
