"""Chunked, padded dispatch for clients that call it with their own expert function; the layer does not use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.tutel.impls.communicate import all_to_all


def a2a_ffn_overlap_forward(
    input: Tensor,
    expert_fn: Callable[[Tensor], Tensor],
    a2a_ffn_overlap_degree: int,
    use_2dh: bool,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Dispatch [E, C, D] in chunks of C, apply `expert_fn`, and return the combined [E, C, D_out]."""
    if input.shape[1] % a2a_ffn_overlap_degree:
        raise ConfigError(f"{input.shape[1]} slots cannot be split into {a2a_ffn_overlap_degree} equal chunks")
    chunks = input.chunk(a2a_ffn_overlap_degree, dim=1)
    if use_2dh:
        received = (all_to_all(chunk, 1, 0, group, use_2dh=True) for chunk in chunks)
        return torch.cat([all_to_all(expert_fn(rows), 0, 1, group, use_2dh=True) for rows in received], 1)
    in_flight = [all_to_all(chunk, 1, 0, group, background=True) for chunk in chunks]
    leaving = [all_to_all(expert_fn(arrive()), 0, 1, group, background=True) for arrive in in_flight]
    return torch.cat([leave() for leave in leaving], 1)
