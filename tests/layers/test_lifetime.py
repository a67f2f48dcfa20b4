"""A forward pass's graph holds no module: layers, blocks and topologies are freed with their last name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, experts, gates, handles
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


def list_leaked_objects(ep: int) -> list[str]:
    """List the modules and topologies that outlive their last name, after a forward of each model."""
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


def test_layers_and_topologies_are_freed() -> None:
    assert list_leaked_objects(1) == []


def list_leaked_objects_on_rank(rank: int, world: int) -> list[str]:
    return list_leaked_objects(world)


def test_layers_and_topologies_are_freed_on_ranks(cluster: Cluster) -> None:
    assert cluster.run(2, list_leaked_objects_on_rank) == [[], []]


def count_data_paths(rank: int, world: int) -> list[int]:
    """Count the registered data paths after each of several topologies is created and closed."""
    counts = []
    for _ in range(4):
        with Topology.from_sizes(world) as topology:
            layer(topology)(torch.randn(4, M))
        gc.collect()
        counts.append(len(handles._handles))
    return counts


def test_data_paths_of_closed_topologies_are_unregistered(cluster: Cluster) -> None:
    for counts in cluster.run(2, count_data_paths):
        assert counts[-1] <= counts[1], counts
