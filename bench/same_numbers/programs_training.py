"""Programs of `fusedmoe.training`: several optimizer steps, wrappers, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import experts, gates, training

from .programs_layers import TOKENS, M, auxiliary_loss, batch, topology_of
from .record import Record


def make_model(topology: fusedmoe.Topology | None, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Sequential:
    torch.manual_seed(3)

    def layer(gate: Any, network: Any) -> nn.Module:
        return fusedmoe.MoELayer(M, gate, network, topology=topology, dtype=dtype, **more)

    return nn.Sequential(
        nn.Linear(M, M, dtype=dtype),
        layer(gates.TopK(experts=8, k=2, capacity_factor=1.0, aux={"balance": 0.1}), experts.SwiGLU(12)),
        nn.LayerNorm(M, dtype=dtype),
        layer(gates.DeepSeekV3(experts=8, k=2, groups=4, groups_kept=2), experts.FeedForward(12, "relu", bias=True)),
    )


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum() / 50 + auxiliary_loss(model)
    return loss


def train(
    record: Record, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, topology: Any, rank: int,
    first: int = 0, wrapper: nn.Module | None = None,
) -> None:  # fmt: skip
    """Record three optimizer steps: losses, gradients, norms, and the parameters after the last step."""
    for number in range(first, first + 3):
        optimizer.zero_grad()
        x = batch(rank, TOKENS[(rank + number) % 4] + 2, torch.float64, seed=10 * number)
        loss = loss_of(model if wrapper is None else wrapper, x)
        loss.backward()
        if wrapper is None:
            training.sync_gradients(model, topology)
        record.note(f"{name} {number}: loss", loss)
        record.gradients(model, f"{name} {number}: ")
        record.note(f"{name} {number}: norm", training.clip_grad_norm(model, topology, max_norm=0.5))
        optimizer.step()
        for layer in model.modules():
            if isinstance(layer, fusedmoe.MoELayer):
                layer.update_gate()
    record.parameters(model, f"{name}: ")


def steps(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int], kind: str) -> None:
    with topology_of(sizes) as topology:
        model = make_model(topology)
        train(record, "steps", model, make_optimizer(kind, model), topology, rank)


def wrapped(record: Record, rank: int, world: int, scratch: Path, kind: str) -> None:
    with topology_of({"ep": 2}) as topology:
        model = make_model(topology)
        wrapper = None
        if kind == "ddp":
            wrapper = training.distributed_data_parallel(model, topology)
        else:
            for part in (model[0], model[2]):
                training.fully_shard(part, topology)
        train(record, kind, model, make_optimizer("sgd", model), topology, rank, wrapper=wrapper)


def saved(record: Record, rank: int, world: int, scratch: Path) -> None:
    """Record three steps with ep, the state that a model over esp loads from them, and three more steps of it."""
    path = scratch / "checkpoint"
    with topology_of({"ep": 2}) as topology:
        model = make_model(topology)
        optimizer = make_optimizer("adamw", model)
        train(record, "before", model, optimizer, topology, rank)
        training.save_checkpoint(path, model, optimizer, topology, {"step": 3, "state": torch.arange(3.0)})
    with topology_of({"esp": 2}) as topology:
        model = make_model(topology)
        optimizer = make_optimizer("adamw", model)
        extra = training.load_checkpoint(path, model, optimizer, topology)
        record.note("extra", extra)
        record.parameters(model, "loaded: ")
        for number, state in enumerate(optimizer.state.values()):
            record.note(f"state {number}", {key: value for key, value in state.items()})
        train(record, "after", model, optimizer, topology, rank, first=3)
