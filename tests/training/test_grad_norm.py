"""The norm of gradients over several meshes equals the norm of the unsharded gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fusedmoe
from fusedmoe import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training import clip_grad_norm
from fusedmoe.training.replicated_parameters import local_part
from tests.cluster import Cluster
from tests.marks import slowly


def check_norm_over_meshes(rank: int, world: int, seed: int) -> None:
    """Sharded, replicated, over the whole world or half of it, each half with equal or different values."""
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
    # Each half of the world holds a nearly equal copy of one tensor, sharded over its mesh, and its own stage.
    own = rank // (world // 2)
    for name, value, grad in (("copied", half * (1 + 1e-3 * own), half), (f"stage{own}", half, half * (1 + own))):
        model.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh["inner"], [Shard(0)])))
        model.get_parameter(name).grad = distribute_tensor(grad, mesh["inner"], [Shard(0)])
    # A gradient is whole where its parameter is not.
    model.register_parameter("whole", nn.Parameter(distribute_tensor(half, mesh, [Shard(0), Replicate()])))
    model.whole.grad = distribute_tensor(half, mesh, [Replicate(), Replicate()])
    wanted += [2 * summand, plain, half, half, 2 * half, half]
    norm = torch.cat([grad.flatten() for grad in wanted]).norm()
    for expected in (norm, norm / 10):
        found = clip_grad_norm(model, None, float(norm) / 10)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world", [2, 4])
def test_norm_over_several_meshes_equals_unsharded(cluster: Cluster, world: int) -> None:
    cluster.run(world, check_norm_over_meshes, torch.seed())


class Experts(nn.Module):
    """One matrix for each expert; its gradient is the input of the call."""

    def __init__(self, value: Tensor, ep: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(value, ep, [Shard(0)]))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * distribute_tensor(grad, self.weight.device_mesh, [Shard(0)])).to_local().sum()


def check_norm_of_fsdp_experts(rank: int, world: int, seed: int) -> None:
    """Experts over half of the ranks, and FSDP2 over ranks with equal experts, in rows that are not adjacent."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
    value, grad = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    model = fully_shard(Experts(value, mesh["ep"]), mesh=mesh["efsdp"])
    model(grad).backward()
    for expected in (grad.norm(), grad.norm() / 10):
        found = clip_grad_norm(model, None, float(grad.norm()) / 10)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.weight.grad.full_tensor(), grad / 10, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world", [2, 4])
def test_norm_of_fully_sharded_experts_equals_unsharded(cluster: Cluster, world: int) -> None:
    cluster.run(world, check_norm_of_fsdp_experts, torch.seed())


def check_inconsistent_parts_rejected(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "fsdp"))
    own, tall = torch.full((4, 3), 1.0 + rank // (world // 2)), torch.ones(4 + rank, 3)
    split = [Shard(rank // (world // 2))]
    for wrong in (
        own,
        tall,
        distribute_tensor(own, mesh["fsdp"], [Shard(0)]),
        distribute_tensor(own, mesh["fsdp"], split),
    ):
        model = nn.ParameterDict({"all": torch.ones(3), "experts": nn.Parameter(wrong)})
        sum(parameter.sum() for parameter in model.values()).backward()
        with pytest.raises(ConfigError, match="experts on ranks .* is no copy of experts on ranks .*mesh of all these"):
            clip_grad_norm(model, None, 1.0)
        assert all(float(local_part(parameter.grad).max()) == 1 for parameter in model.values())


@pytest.mark.parametrize("world", [2, *slowly(4)])
def test_inconsistent_shards_of_parameter_are_rejected(cluster: Cluster, world: int) -> None:
    cluster.run(world, check_inconsistent_parts_rejected)


def test_norm_in_one_process() -> None:
    model = nn.Linear(3, 4)
    model(torch.randn(2, 3)).sum().backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(clip_grad_norm(model, None, 1e9).float(), norm)


def check_missing_topology_rejected(rank: int, world: int) -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world)
    layer = fusedmoe.MoELayer(4, fusedmoe.gates.TopK(2), fusedmoe.experts.SwiGLU(4), topology=topology)
    with pytest.raises(ConfigError, match="topology"):
        clip_grad_norm(layer, None, 1.0)


def test_negative_and_nan_max_norm_are_rejected() -> None:
    """They would reverse gradients, or make them NaN."""
    for norm in (-1.0, math.nan):
        with pytest.raises(ConfigError, match=f"max_norm = {norm}"):
            clip_grad_norm(nn.Linear(2, 2), Topology(), norm)


def test_sharded_layer_without_topology_is_rejected(cluster: Cluster) -> None:
    cluster.run(2, check_missing_topology_rejected)
