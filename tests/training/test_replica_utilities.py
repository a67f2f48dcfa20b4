"""PyTorch's utilities that treat parameters of ranks as replicas: refused for sharded experts, else right."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import fusedmoe
from fusedmoe import Topology, routing
from fusedmoe.errors import ConfigError
from fusedmoe.training import expert_parameter_names, fully_shard, sync_gradients
from fusedmoe.tutel.moe import moe_layer
from tests.cluster import Cluster

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OFFLOADED = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)


def _layer(topology: Topology, placement: Any = "ep") -> nn.Module:
    torch.manual_seed(3)
    gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(6)
    return fusedmoe.MoELayer(4, gate, experts, topology=topology, mp_input="split", placement=placement)


def _tutel() -> nn.Module:
    torch.manual_seed(3)
    ffn = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6}
    return moe_layer(gate_type={"type": "top", "k": 2}, model_dim=4, experts=ffn)


@contextmanager
def _assert_rejected(model: nn.Module, says: str) -> Iterator[None]:
    """Check that the body raises `ConfigError` and changes no parameter."""
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(
        ConfigError, match=rf"rank \d: PyTorch's .*{says}.* hold different experts\. .*fusedmoe\.training"
    ):
        yield
    assert all(map(torch.equal, model.parameters(), before))


def _utilities(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    state = get_model_state_dict(model)
    first = state if dist.get_rank() == 0 else {}
    slots = get_optimizer_state_dict(model, optimizer)

    def zero(lr: float) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=lr).step()

    def local_sgd() -> Any:
        return PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), PeriodicModelAverager(1, 0)).step()

    def hierarchical() -> Any:
        periods = OrderedDict({1: dist.get_world_size()})
        return HierarchicalModelAverager(periods, warmup_steps=0).average_parameters(model.parameters())

    return {
        "ZeroRedundancyOptimizer": lambda: zero(0.1),
        "ZeroRedundancyOptimizer.*": lambda: zero(0.0),
        "average_parameters": lambda: PeriodicModelAverager(1, 0).average_parameters(model.parameters()),
        "average_parameters.*": lambda: PeriodicModelAverager(1, 0).average_parameters(optimizer.param_groups),
        "average_parameters .model": lambda: average_parameters(iter(list(model.parameters())), None),
        "model averagers": hierarchical,
        "PostLocalSGDOptimizer": local_sgd,
        "StateDictOptions": lambda: get_model_state_dict(model, options=FULL),
        "StateDictOptions.full": lambda: get_state_dict(model, optimizer, options=FULL),
        "StateDictOptions.full_": lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
        "full_state_dict": lambda: set_model_state_dict(model, first, options=BROADCAST),
        "full_state_dict=": lambda: set_model_state_dict(model, first, options=OFFLOADED),
        "full_state_dict=True": lambda: set_optimizer_state_dict(model, optimizer, slots, options=BROADCAST),
        "FullyShardedDataParallel": lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    }


def _check_utilities_rejected(rank: int, world: int, kind: str) -> None:
    if kind == "tutel":
        model = nn.Sequential(nn.Linear(4, 4), _tutel())
    else:
        axes, placement = ({"ep": world}, "fssdp") if kind == "fssdp" else ({kind: world}, "ep")
        model = nn.Sequential(nn.Linear(4, 4), _layer(Topology.from_sizes(**axes), placement))
    model = copy.deepcopy(model) if kind == "ep" else model
    optimizer = torch.optim.AdamW(model.parameters())
    # Before the first forward pass.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for says, utility in _utilities(model, optimizer).items():
        with _assert_rejected(model, says):
            utility()
    # Rank-local parameters are allowed, and so is everything for the dense part.
    set_model_state_dict(model, get_model_state_dict(model))
    dense = list(model[0].parameters())
    PeriodicModelAverager(1, 0).average_parameters(dense)
    names = expert_parameter_names(model)
    assert names
    rest = [parameter for name, parameter in model.named_parameters() if name not in names]
    ZeroRedundancyOptimizer(rest, torch.optim.SGD, lr=0.1).step()
    get_model_state_dict(model[0], options=FULL)
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), ignored_states=list(model[1].parameters()))


@pytest.mark.parametrize("kind", ["ep", "esp", "fssdp", "tutel"])
def test_replica_utilities_reject_sharded_experts(cluster: Cluster, kind: str) -> None:
    cluster.run(2, _check_utilities_rejected, kind)


def _nested_fsdp1(rank: int, world: int) -> None:
    """An outer FSDP1 ignores the parameters that nested ones ignore or flatten."""
    topology, device = Topology.from_sizes(ep=world), torch.device("cpu")
    own = [dist.new_group([member]) for member in range(world)][rank]

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _layer(topology)))

    def ignored(model: Any) -> None:
        model[1] = FullyShardedDataParallel(model[1], device_id=device, ignored_modules=[model[1][1]])

    def ignored_by_a_sibling(model: Any) -> None:
        states = iter(list(model[1][1].parameters()))
        model[0] = FullyShardedDataParallel(model[0], device_id=device, ignored_states=states)

    def flattened(model: Any, **options: Any) -> None:
        model[1] = FullyShardedDataParallel(model[1], device_id=device, process_group=own, **options)

    def original(model: Any) -> None:
        flattened(model, use_orig_params=True)

    for nest in (ignored, ignored_by_a_sibling, flattened, original):
        model = block()
        nest(model)
        model = FullyShardedDataParallel(model, device_id=device, use_orig_params=nest is original)
        assert list(routing.find_routers(model)) == ["1.1"]
    model = block()
    model[0] = FullyShardedDataParallel(model[0], device_id=device)
    with _assert_rejected(model[1], "FullyShardedDataParallel"):
        FullyShardedDataParallel(model, device_id=device)


def test_nested_fsdp1_with_sharded_experts(cluster: Cluster) -> None:
    cluster.run(2, _nested_fsdp1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ep", "fssdp"])
def test_replica_utilities_reject_sharded_experts_on_four_ranks(cluster: Cluster, kind: str) -> None:
    cluster.run(4, _check_utilities_rejected, kind)


def _check_groups_of_copies(rank: int, world: int) -> None:
    """On two of four ranks each expert has a copy: utilities accept these groups, but not the whole world."""
    topology = Topology.from_sizes(ep=2)
    model = _layer(topology)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(list(model.parameters()))
    average_parameters(iter(list(model.parameters())), topology.edp.handle)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=topology.edp.handle, lr=0.0).step()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=1e-12)
    with _assert_rejected(model, "average_parameters"):
        average_parameters(iter(list(model.parameters())), None)
    sharded = fully_shard(_layer(topology), topology, shard_experts=True)
    with pytest.raises(ConfigError, match="different experts"):
        get_model_state_dict(sharded, options=FULL)


@pytest.mark.slow
def test_replica_utilities_accept_groups_with_equal_experts(cluster: Cluster) -> None:
    cluster.run(4, _check_groups_of_copies)


def _check_replicated_experts(rank: int, world: int) -> None:
    """Experts that every rank has are ordinary replicas. (PyTorch cannot offload a state with custom keys.)"""
    model = nn.Sequential(nn.Linear(4, 4), _layer(Topology()))
    topology = Topology.from_sizes()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    sync_gradients(model, topology)
    optimizer.step()
    for name, utility in _utilities(model, optimizer).items():
        if name != "full_state_dict=":
            utility()


def test_replica_utilities_accept_replicated_experts(cluster: Cluster) -> None:
    cluster.run(2, _check_replicated_experts)


def _check_transformers_model(rank: int, world: int, folder: str) -> None:
    from tests.integrations.test_hf_parallel import load

    model = load(rank, world, folder, {"fsdp_size": 2, "ep_size": 2, "tp_size": 1})
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match="average_parameters .* different experts"):
        PeriodicModelAverager(1, 0).average_parameters(parameters)
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer .* different experts"):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.0).step()
    # Their meshes hold all experts.
    state: dict[str, Tensor] = get_model_state_dict(model, options=FULL)
    set_model_state_dict(model, state if rank == 0 else {}, options=BROADCAST)


@pytest.mark.slow
def test_replica_utilities_with_hugging_face_experts(cluster: Cluster, tmp_path: Path) -> None:
    from tests.integrations.models import make

    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(2, _check_transformers_model, str(tmp_path))
