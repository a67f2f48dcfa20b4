"""Modes and options of PyTorch around layers over ranks: other norms, `join`, `torch.jit`, swapped parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fusedmoe
from fusedmoe import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import clip_grad_norm, distributed_data_parallel, sync_gradients
from fusedmoe.tutel.moe import moe_layer
from tests.cluster import Cluster

NORMS = (1, 2, 2.5, 0.5, 7, math.inf, "inf")


def _model(topology: Topology | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.FeedForward(6)
    return nn.Sequential(nn.Linear(4, 4), fusedmoe.MoELayer(4, gate, experts, topology=topology, **options)).double()


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def _fill(model: nn.Module, whole: dict[str, Tensor], topology: Topology) -> None:
    for name, parameter in model.named_parameters():
        part = whole[name]
        if "experts" in name:
            part = part.chunk(topology.ep.size, 0)[topology.ep.index]
        parameter.grad = part.clone()


def _check_norms(rank: int, world: int, options: dict[str, Any]) -> None:
    topology = Topology.from_sizes(ep=world)
    model = _model(topology, **options)
    plain = _model()
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    whole = {name: parameter.grad.clone() for name, parameter in plain.named_parameters() if parameter.grad is not None}
    for norm_type in NORMS:
        _fill(plain, whole, Topology())
        _fill(model, whole, topology)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)  # type: ignore[arg-type]
        norm = clip_grad_norm(model, topology, 0.5, norm_type)  # type: ignore[arg-type]
        torch.testing.assert_close(norm, wanted, rtol=1e-10, atol=0)
        clipped = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        _fill(plain, clipped, topology if world == 1 else Topology())
        for name, parameter in model.named_parameters():
            expected = clipped[name].chunk(world, 0)[rank] if "experts" in name else clipped[name]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=0)
    for bad in (math.nan, math.inf):
        _fill(model, whole, topology)
        before = [gradient.clone() for gradient in _gradients(model)]
        # Infinity or NaN on one rank alone.
        if rank == world - 1:
            list(_gradients(model))[-1].view(-1)[0] = bad
            before[-1].view(-1)[0] = bad
        for norm_type in (2, math.inf, 1):
            with pytest.raises(RankError, match=rf"rank {rank}: clip_grad_norm: the norm of order .* is {bad}"):
                clip_grad_norm(model, topology, 0.5, norm_type, error_if_nonfinite=True)
        for gradient, unscaled in zip(_gradients(model), before, strict=True):
            torch.testing.assert_close(gradient, unscaled, rtol=0, atol=0, equal_nan=True)
        assert not clip_grad_norm(model, topology, 0.5, math.inf).isfinite()
    for norm_type in (0, -1, -math.inf, math.nan):
        with pytest.raises(ConfigError, match="norm_type = "):
            clip_grad_norm(model, topology, 0.5, norm_type)
    model.zero_grad()
    assert clip_grad_norm(model, topology, 0.5, math.inf) == 0  # no gradients at all


@pytest.mark.parametrize("world", [1, 2])
def test_norms_of_any_order_equal_one_process(cluster: Cluster, world: int) -> None:
    cluster.run(world, _check_norms, {})


@pytest.mark.slow
@pytest.mark.parametrize(("world", "options"), [(4, {}), (2, {"placement": "fssdp"})])
def test_norms_of_any_order_over_more_ranks(cluster: Cluster, world: int, options: dict[str, Any]) -> None:
    cluster.run(world, _check_norms, options)


def _check_join_rejected(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world)
    model = distributed_data_parallel(_model(topology, mp_input="split"), topology)
    for enter in (lambda: model.join(), lambda: Join([model])):
        with pytest.raises(ConfigError, match=rf"rank {rank}: join\(\) .* batches of no tokens"), enter():
            raise AssertionError("entered")
    # The alternative: equal numbers of batches on all ranks, some without tokens.
    for tokens in (3, 0) if rank else (3, 2):
        model(torch.randn(tokens, 4, dtype=torch.float64)).square().sum().backward()


def test_join_is_rejected(cluster: Cluster) -> None:
    cluster.run(2, _check_join_rejected)
    with distributed_data_parallel(_model(), Topology()).join():
        pass


def test_torch_jit_is_rejected() -> None:
    ffn = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6}
    tutel = moe_layer(gate_type={"type": "top", "k": 2}, model_dim=4, experts=ffn)
    x = torch.randn(3, 4)
    for layer in (_model()[1].float(), tutel, nn.Sequential(nn.Linear(4, 4), _model()[1].float())):
        with pytest.raises(ConfigError, match="torch.jit cannot script or trace layers of fusedmoe"):
            torch.jit.script(layer)
        with pytest.raises(ConfigError, match="torch.jit cannot script or trace layers of fusedmoe"):
            torch.jit.trace(layer, x)
        layer(x)


def _check_swapped_parameters(rank: int, world: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        topology = Topology.from_sizes(ep=world)
        model = _model(topology, mp_input="split")
        x = torch.randn(3, 4)
        model.float()(x).sum().backward()
        model.double()
        model.load_state_dict(model.state_dict())
        sync_gradients(model, topology)
        for convert in (model.float, lambda: model.load_state_dict(model.state_dict())):
            with pytest.raises(ConfigError, match=r"FeedForward: \w\d is .*set_swap_module_params_on_conversion"):
                convert()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.float()(x).sum().backward()


def test_swapped_module_parameters(cluster: Cluster) -> None:
    cluster.run(2, _check_swapped_parameters)
