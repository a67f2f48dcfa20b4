"""Experts that call collectives: correct without a schedule, and rejected by name inside a schedule's chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedmoe
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.schedule import Schedule
from fusedmoe.tutel import moe, net
from tests.cluster import Cluster
from tests.marks import slowly

M = 8


class _ReducedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(torch.ones(1))
        return dy


class Talking(nn.Module):
    """Single expert that calls a collective in one of its passes."""

    def __init__(self, dim: int, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(dim, dim), where

    def forward(self, x: Tensor, *ctx: Any) -> Tensor:
        if self.where == "forward":
            dist.all_reduce(torch.ones(1))
        if self.where == "all-gather of objects":
            dist.all_gather_object([None] * dist.get_world_size(), 1)
        if self.where == "Tutel all-gather":
            net.zero_gather(torch.ones(2))
        y: Tensor = self.linear(x)
        return _ReducedBackward.apply(y) if self.where == "backward" else y


WHERE = ["forward", "backward", "all-gather of objects", "Tutel all-gather"]


class Doubled(nn.Module):
    """Dense part."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


def error_with_schedule(rank: int, world: int, where: str, integration: str) -> tuple[str, str]:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    x = torch.randn(12, M).requires_grad_()
    if integration == "tutel":
        experts = {"type": "custom", "module": lambda **_: Talking(M, where), "num_experts_per_device": 1}
        layer: Any = moe.moe_layer({"type": "top", "k": 1}, M, experts, seeds=(1, rank, 1), a2a_ffn_overlap_degree=2)
    else:
        gate, experts = fusedmoe.gates.TopK(2 * world, 2), fusedmoe.experts.Custom(lambda dim: Talking(dim, where))
        schedule = Schedule("fsmoe", degrees=(2, 2)) if integration == "layer" else "off"
        layer = fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule)
    if integration == "blocks":
        layer, x = fusedmoe.pipeline([Parts(Doubled(), layer)]), x.view(4, 3, M)
    with pytest.raises((ConfigError, RankError)) as caught:
        layer(x).sum().backward()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("where", "integration"),
    [
        ("forward", "layer"),
        ("backward", "layer"),
        *slowly(("all-gather of objects", "layer"), ("Tutel all-gather", "layer"), ("Tutel all-gather", "tutel")),
        *slowly(("forward", "blocks"), ("backward", "blocks")),
    ],
)
def test_schedule_rejects_communicating_experts(cluster: Cluster, where: str, integration: str) -> None:
    errors = cluster.run(2, error_with_schedule, where, integration)
    assert "ConfigError" in {kind for kind, _ in errors}
    for _, text in errors:
        assert "Talking" in text or "Custom" in text
        assert "while the collectives of a schedule run" in text and "run it without a schedule" in text


def compare_without_schedule(rank: int, world: int, where: str) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    gate, experts = fusedmoe.gates.TopK(2 * world, 2), fusedmoe.experts.Custom(lambda dim: Talking(dim, where))
    layer = fusedmoe.MoELayer(M, gate, experts, topology=topology, dtype=torch.float64)
    x = torch.randn(12 - 12 * (rank == 1), M, dtype=torch.float64).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("where", [*slowly(*WHERE)])
def test_communicating_experts_without_schedule_equal_dense(cluster: Cluster, where: str) -> None:
    cluster.run(2, compare_without_schedule, where)
