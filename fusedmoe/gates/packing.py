"""Validation of packed sequences (`cu_seqlens`), for balance losses per sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import require_values
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate, trait_applies
from fusedmoe.losses import Packing

_REQUIREMENT = "cu_seqlens must ascend from 0 to the number of tokens"


def read_cu_seqlens(gate: Gate, cu_seqlens: Any, x: Tensor) -> Packing:
    """Validate `cu_seqlens` and assign each token of x, [..., M], to its sequence, without device synchronization.

    Raises:
        ConfigError: the gate has no loss per packed sequence, or `cu_seqlens` has an invalid dtype, shape, device or
            values. On CUDA and in a graph a device-side assertion checks the values.
    """
    tokens, name = x.shape[:-1].numel(), type(gate).__name__
    if not gate.has_packed_loss or not trait_applies(type(gate), "has_packed_loss", ("forward", "route", "choose")):
        raise ConfigError(f"MoELayer got cu_seqlens, but its {name} gate has no loss per sequence; use DeepSeekV3")
    if gate.loss_sequence is not None:
        raise ConfigError(
            f"MoELayer got cu_seqlens, but its {name} gate computes its loss per {gate.loss_sequence} tokens; create "
            "the gate without `sequence`"
        )
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.dim() != 1
        or len(cu_seqlens) == 0
    ):
        is_tensor = isinstance(cu_seqlens, Tensor)
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if is_tensor else type(cu_seqlens).__name__
        raise ConfigError(
            f"MoELayer: cu_seqlens must be int32 or int64 [sequences + 1], the first token of each sequence and then "
            f"the number of tokens, {tokens}; got {got}"
        )
    if cu_seqlens.device != x.device and cu_seqlens.device.type != "cpu":
        raise ConfigError(
            f"MoELayer got cu_seqlens on {cu_seqlens.device} but input on {x.device}; move one with .to()"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
        require_values("MoELayer", right, _REQUIREMENT)
    else:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] != tokens or starts != sorted(starts):
            given = f"{starts[:8]}"[:-1] + (", …]" if len(starts) > 8 else "]")
            raise ConfigError(f"MoELayer: {_REQUIREMENT}, {tokens}; got {given} that ends with {starts[-1]}")
    ends_B = cu_seqlens[1:].to(x.device, torch.long)
    # A token's sequence is the number of sequences that end at or before it; this skips empty sequences.
    return Packing(torch.searchsorted(ends_B, torch.arange(tokens, device=x.device), right=True), len(ends_B))
