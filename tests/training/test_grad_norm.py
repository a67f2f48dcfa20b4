"""Gradients over several meshes have the norm that they have in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fusedmoe
from fusedmoe.errors import ConfigError
from fusedmoe.training import clip_grad_norm
from tests.cluster import Cluster


def over_meshes(rank: int, world: int, seed: int) -> None:
    """Sharded, replicated, over the whole world or half of it, each half with the same values or with other ones."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    model, wanted, chance = nn.Module(), [], torch.Generator().manual_seed(seed)
    placements: list[tuple[str, list[Placement]]] = [
        ("both", [Shard(0), Shard(1)]),
        ("outer", [Shard(1), Replicate()]),
        ("inner", [Replicate(), Shard(0)]),
        ("none", [Replicate(), Replicate()]),
    ]
    for name, split in placements:
        value, grad = torch.randn(2, 5, 7, generator=chance, dtype=torch.double)
        parameter = nn.Parameter(distribute_tensor(value, mesh, split))
        parameter.grad = distribute_tensor(grad, mesh, split)
        model.register_parameter(name, parameter)
        wanted.append(grad)
    summand, plain, half = torch.randn(3, 4, generator=chance, dtype=torch.double)
    partial = nn.Parameter(distribute_tensor(summand, mesh, [Replicate(), Replicate()]))
    partial.grad = DTensor.from_local(summand.clone(), mesh, [Partial(), Replicate()])
    model.register_parameter("partial", partial)
    model.register_parameter("plain", nn.Parameter(plain.clone()))
    model.plain.grad = plain.clone()
    # Each half of the world holds other experts under one name, and a stage of its own.
    for name, grad in (("experts", half), (f"stage{rank // (world // 2)}", half * (1 + rank // (world // 2)))):
        model.register_parameter(name, nn.Parameter(distribute_tensor(half, mesh["inner"], [Shard(0)])))
        model.get_parameter(name).grad = distribute_tensor(grad, mesh["inner"], [Shard(0)])
    wanted += [2 * summand, plain, half, half, half, 2 * half]
    norm = torch.cat([grad.flatten() for grad in wanted]).norm()
    for expected in (norm, norm / 10):
        found = clip_grad_norm(model, None, float(norm) / 10)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world", [2, 4])
def test_over_several_meshes(cluster: Cluster, world: int) -> None:
    cluster.run(world, over_meshes, torch.seed())


def test_in_one_process() -> None:
    model = nn.Linear(3, 4)
    model(torch.randn(2, 3)).sum().backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(clip_grad_norm(model, None, 1e9).float(), norm)


def refused(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world)
    layer = fusedmoe.MoELayer(4, fusedmoe.gates.TopK(2), fusedmoe.experts.SwiGLU(4), topology=topology)
    with pytest.raises(ConfigError, match="topology"):
        clip_grad_norm(layer, None, 1.0)


def test_split_layers_need_their_topology(cluster: Cluster) -> None:
    cluster.run(2, refused)
