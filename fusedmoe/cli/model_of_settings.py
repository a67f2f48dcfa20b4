"""The model, its optimizer and what moves its experts, as settings describe them."""

from __future__ import annotations

import torch
from torch import nn

from fusedmoe.cli.data import mix
from fusedmoe.cli.settings import Settings
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.wire_hooks import Hooks, WireCast
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.training import ShardedExperts

#: What rows travel in, where that is not what they are computed in.
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BETAS = (0.9, 0.95)


def shard_experts(
    model: Transformer, optimizer: torch.optim.Optimizer, topology: Topology, settings: Settings
) -> ShardedExperts | None:
    """Has the settings' policy move the experts; None where they stay."""
    if settings.placement == "ep":
        return None
    return ShardedExperts(
        model,
        optimizer,
        topology,
        policy="hecate" if settings.placement == "fssdp" else settings.placement,
        memory=settings.placement_memory,
        overlap=settings.placement_overlap,
        rematerialises=settings.rematerialise,
    )


def make_hooks(settings: Settings) -> tuple[Hooks, ...]:
    """What compresses rows on their way, if anything does."""
    return (WireCast(WIRE_DTYPES[settings.wire_dtype]),) if settings.wire_dtype in WIRE_DTYPES else ()


def make_model(settings: Settings, model: ModelConfig, topology: Topology, device: torch.device) -> Transformer:
    """The model with its parameters drawn from the seed: the same ones in every world."""
    torch.manual_seed(mix("parameters", settings.seed))
    dtype = torch.float64 if settings.dtype == "fp64" else torch.float32
    return Transformer(
        model,
        topology,
        dispatch=settings.dispatch,
        hooks=make_hooks(settings),
        recompute=settings.recompute,
        placement="ep" if settings.placement == "ep" else "fssdp",
        device=device,
        dtype=dtype,
    )


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and _is_weight(name)
        groups[is_matrix].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": settings.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=settings.peak_lr,
        betas=_BETAS,
        fused=True,
    )


def _is_weight(name: str) -> bool:
    """Experts stack their biases to matrices: the name tells them apart."""
    last = name.rpartition(".")[2]
    return "bias" not in last and last not in ("b1", "b2")
