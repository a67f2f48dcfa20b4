"""What a forward pass leaves in a graph holds no module: layers, blocks and topologies go with their last name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, experts, gates
from fusedmoe.autograd.exchange_operators import _ways
from tests.cluster import Cluster

M = 8


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(M, M)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


def own(model_dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(model_dim, 4), nn.Tanh(), nn.Linear(4, model_dim))


def layer(topology: Topology, **options: Any) -> MoELayer:
    network = options.pop("network", None) or experts.SwiGLU(4)
    return MoELayer(M, gates.TopK(4, 2, aux={"balance": 1.0}), network, topology=topology, **options)


def blocks(topology: Topology, **options: Any) -> nn.Module:
    pairs = [(Dense(), layer(topology, network=options.get("network", lambda: None)())) for _ in range(2)]
    return fusedmoe.pipeline(pairs, (2, 2), recompute=options.get("recompute", False))


MODELS: dict[str, Callable[[Topology], nn.Module]] = {
    "plain": layer,
    "hooks": lambda topology: layer(topology, hooks=[fusedmoe.Hooks()]),
    "own experts": lambda topology: layer(topology, network=experts.Custom(own)),
    "chunks": lambda topology: layer(topology, schedule=Schedule("fsmoe", (2, 3))),
    "own experts in chunks": lambda topology: layer(
        topology, network=experts.Custom(own), schedule=Schedule("fsmoe", (2, 2)), hooks=[fusedmoe.Hooks()]
    ),
    "layers": lambda topology: nn.Sequential(layer(topology, hooks=[fusedmoe.Hooks()]), layer(topology)),
    "placed": lambda topology: layer(topology, placement="fssdp"),
    "shared": lambda topology: layer(topology, shared=experts.SwiGLU(4)),
    "blocks": blocks,
    "blocks of own experts": lambda topology: blocks(topology, network=lambda: experts.Custom(own)),
    "blocks that compute again": lambda topology: blocks(topology, recompute=True),
}


def left(ep: int) -> list[str]:
    """What is there after one forward pass of each model, with a graph, of what has no name any more."""
    seen: dict[str, weakref.ref[Any]] = {}
    for how, make in MODELS.items():
        topology = Topology.from_sizes(ep) if ep > 1 else Topology()
        model = make(topology)
        seen |= {f"{how}, {name}: {type(one).__name__}": weakref.ref(one) for name, one in model.named_modules()}
        seen[f"{how}: topology"] = weakref.ref(topology)
        y = model(torch.randn(4, 3, M, requires_grad=True))
        assert y.requires_grad
        del model, topology, y
    gc.collect()
    return [name for name, one in seen.items() if one() is not None]


def test_nothing_is_left() -> None:
    assert left(1) == []


def on_ranks(rank: int, world: int) -> list[str]:
    return left(world)


def test_nothing_is_left_on_ranks(cluster: Cluster) -> None:
    assert cluster.run(2, on_ranks) == [[], []]


def names_of_ways(rank: int, world: int) -> list[int]:
    """How many there are after each of some topologies, which come and go."""
    counts = []
    for _ in range(4):
        with Topology.from_sizes(world) as topology:
            layer(topology)(torch.randn(4, M))
        gc.collect()
        counts.append(len(_ways))
    return counts


def test_names_of_ways_that_are_gone_are_forgotten(cluster: Cluster) -> None:
    for counts in cluster.run(2, names_of_ways):
        assert counts[-1] <= counts[1], counts
