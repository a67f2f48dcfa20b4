"""Gates of every kind, and routing results that a plain loop can check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.gates import GATES, Gate, Routing
from fusedmoe.gates.base import SoftRouting

ROUTED = [name for name in GATES if name != "softmoe"]
LEARNED = [name for name in GATES if name not in ("hash", "random")]
TOP_K = ["topk", "gshard", "sigmoid", "xmoe", "batch_prioritised", "hash", "random", "deepseek_v3"]


def make(name: str, experts: int, k: int = 1, *, dim: int | None = None, dtype: Any = None, **options: Any) -> Gate:
    """Build a gate by name, with k if the gate has one; with ``dim``, its parameters are random and not small."""
    if name not in ("switch", "softmoe"):
        options["k"] = k
    gate = GATES[name](experts=experts, **options)
    if dim is not None:
        gate.setup(dim, dtype=dtype)
        with torch.no_grad():
            for parameter in gate.parameters():
                if parameter.numel() > 1 or parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return gate


def parts(routing: Routing | SoftRouting) -> list[Tensor]:
    """Return the floating-point results; the auxiliary loss is last."""
    if isinstance(routing, SoftRouting):
        return [routing.dispatch_SN, routing.combine_SN, routing.aux_loss]
    return [routing.weight_SK, routing.aux_loss]


def ids(routing: Routing | SoftRouting) -> Tensor:
    assert isinstance(routing, Routing)
    return routing.expert_SK


def best_first(scores: list[float], k: int) -> list[int]:
    """Select the k highest scores; ties select the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
