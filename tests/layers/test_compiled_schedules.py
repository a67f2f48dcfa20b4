"""Layers with a schedule inside compiled models: no break, one graph for all of them, the results of "off"."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe
from tests.cluster import Cluster
from tests.layers.gate_cases import make

M = 16
COSTS = None


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class MoEBlock(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(M, dtype=torch.float64), layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(self.norm(x))
        return y


def a_layer(topology: fusedmoe.Topology, schedule: Any, **more: Any) -> fusedmoe.MoELayer:
    more = {"gate": make("topk", 4, 2), "experts": fusedmoe.experts.SwiGLU(8)} | more
    gate, experts = more.pop("gate"), more.pop("experts")
    return fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule, dtype=torch.float64, **more)


def step(blocks: nn.Module, x: Tensor, layers: list[fusedmoe.MoELayer]) -> dict[str, Tensor]:
    """Output and all gradients."""
    x = x.detach().requires_grad_()
    y = blocks(x)
    blocks.zero_grad(set_to_none=True)
    (y.square().sum() + sum(layer.aux_loss for layer in layers)).backward()
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}


def differences(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    worst = 0.0
    for name, tensor in right.items():
        if tensor.numel():
            worst = max(worst, float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1)))
    return worst


def compiled_blocks(
    rank: int, world: int, schedules: dict[str, Any], count: int, sizes: list[int], esp: int = 1
) -> dict[str, tuple[int, float]]:
    """How many graphs so many blocks need, compiled one by one, and the largest difference from "off" in eager mode."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world // esp, esp=esp, timeout_s=60)
    found = {}
    for name, schedule in schedules.items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        layers = [a_layer(topology, schedule) for _ in range(count)]
        off = [a_layer(topology, "off") for _ in range(count)]
        blocks, plain = (nn.Sequential(*map(MoEBlock, every)) for every in (layers, off))
        plain.load_state_dict(blocks.state_dict())
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
        worst = 0.0
        for size in sizes:
            x = torch.randn(size + 3 * rank, M, dtype=torch.float64)
            worst = max(worst, differences(step(blocks, x, layers), step(plain, x, off)))
        found[name] = counter.frame_count, worst
    return found


SCHEDULES = {
    "fsmoe": fusedmoe.Schedule("fsmoe", (2, 2)),
    "other degrees": fusedmoe.Schedule("fsmoe", (3, 2)),
    "off": "off",
}


def test_one_graph_for_all_blocks_with_a_schedule(cluster: Cluster) -> None:
    for found in cluster.run(2, compiled_blocks, SCHEDULES, 3, [5, 9, 2]):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found
