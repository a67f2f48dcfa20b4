"""Checks of packed sequences, for a balance loss in each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.checks import require_values
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate, said_beside
from fusedmoe.losses import Packing

_VALUES = "cu_seqlens must ascend from 0 to the number of tokens"


def pack(gate: Gate, cu_seqlens: Any, x: Tensor) -> Packing:
    """Check `cu_seqlens` and assign each token of x, [..., M], to its sequence. Never synchronizes with the device.

    Raises:
        ConfigError: the gate takes no loss per packed sequence, or `cu_seqlens` has another dtype, shape or device, or
            other values. On CUDA and in a graph an assertion on the device checks the values.
    """
    tokens, name = x.shape[:-1].numel(), type(gate).__name__
    if not gate.packs or not said_beside(type(gate), "packs", ("forward", "route", "choose")):
        raise ConfigError(f"MoELayer got cu_seqlens, but its {name} gate takes no loss per sequence; DeepSeekV3 does")
    if gate.loss_sequence is not None:
        raise ConfigError(
            f"MoELayer got cu_seqlens, but its {name} gate takes its loss in sequences of {gate.loss_sequence} tokens; "
            "make the gate without `sequence`"
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
            f"MoELayer got cu_seqlens that are {got}; it takes int32 or int64 [sequences + 1], the first token of each "
            f"sequence and then the number of tokens, {tokens}"
        )
    if cu_seqlens.device != x.device and cu_seqlens.device.type != "cpu":
        raise ConfigError(
            f"MoELayer got cu_seqlens on {cu_seqlens.device} but input on {x.device}; move one with .to()"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
        require_values("MoELayer", right, _VALUES)
    else:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] != tokens or starts != sorted(starts):
            given = f"{starts[:8]}"[:-1] + (", …]" if len(starts) > 8 else "]")
            raise ConfigError(f"MoELayer: {_VALUES}, {tokens}; got {given} that ends with {starts[-1]}")
    ends_B = cu_seqlens[1:].to(x.device, torch.long)
    # The number of sequences that end at or before a token: empty sequences are skipped.
    return Packing(torch.searchsorted(ends_B, torch.arange(tokens, device=x.device), right=True), len(ends_B))
