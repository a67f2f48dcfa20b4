"""A parameter that only some ranks have frozen is refused by name, at any time of freezing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fusedmoe
from fusedmoe.training import distributed_data_parallel, sync_gradients
from tests.cluster import Cluster

M, E = 6, 4


def make_model(topology: fusedmoe.Topology, custom: bool = False) -> nn.Module:
    torch.manual_seed(0)
    own = fusedmoe.experts.Custom(lambda m: nn.Linear(m, m)) if custom else fusedmoe.experts.SwiGLU(8)
    return nn.Sequential(nn.Linear(M, M), fusedmoe.MoELayer(M, fusedmoe.gates.TopK(E, 2), own, topology=topology))


def step(model: nn.Module, topology: fusedmoe.Topology, rank: int) -> None:
    torch.manual_seed(rank)
    model(torch.randn(9, M)).square().sum().backward()
    sync_gradients(model, topology)
    model.zero_grad()


def freeze_on_one(rank: int, world: int, name: str, steps: int) -> str:
    topology = fusedmoe.Topology.from_sizes(ep=2, timeout_s=60)
    model = make_model(topology)
    for _ in range(steps):
        step(model, topology, rank)
    model.get_parameter(name).requires_grad_(rank != 1)
    with pytest.raises(fusedmoe.RankError) as error:
        step(model, topology, rank)
    return str(error.value)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ["0.weight", "1.gate.weight_EM", "1.experts.w1"])
def test_parameter_frozen_on_one_rank_is_rejected_by_name(cluster: Cluster, name: str, steps: int) -> None:
    for rank, text in enumerate(cluster.run(2, freeze_on_one, name, steps)):
        assert re.match(rf"rank {rank}: gradient all-reduce: {re.escape(name)} is frozen on ranks \[1\]", text), text


def check_allowed_freezing(rank: int, world: int) -> None:
    """Allowed freezing: the same parameters on all ranks; experts that other ranks do not have."""
    topology = fusedmoe.Topology.from_sizes(ep=2, timeout_s=60)
    model = make_model(topology, custom=True)
    step(model, topology, rank)
    model[0].weight.requires_grad_(False)
    model[1].experts.experts[str(rank * 2)].requires_grad_(rank == 0)  # experts 0 and 2 are on ranks 0 and 1
    for _ in range(3):
        step(model, topology, rank)


def test_consistent_and_rank_local_freezing_is_allowed(cluster: Cluster) -> None:
    cluster.run(2, check_allowed_freezing)


def error_of_wrapper(rank: int, world: int) -> str:
    topology = fusedmoe.Topology.from_sizes(ep=2, timeout_s=60)
    model = make_model(topology)
    model[0].bias.requires_grad_(rank != 1)
    with pytest.raises(fusedmoe.RankError) as error:
        distributed_data_parallel(model, topology)
    return str(error.value)


def test_ddp_compares_requires_grad_at_construction(cluster: Cluster) -> None:
    for text in cluster.run(2, error_of_wrapper):
        assert "distributed_data_parallel: requires_grad of 0.bias is True on ranks [0] and False on ranks [1]" in text
