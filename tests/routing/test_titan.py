"""Expert choices in torchtitan's models."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import fusedmoe.titan
from fusedmoe import ConfigError, routing
from tests.cluster import Cluster
from tests.integrations import test_titan as titan
from tests.integrations.test_titan import EXPERTS, OURS, K, batch, loss_of, model_of, overridden

LAYERS = ["layers.0.moe.router", "layers.1.moe.router"]


def given_for(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, EXPERTS, generator=generator).topk(K).indices for _ in LAYERS]


def record_called_experts(model: Any) -> list[Tensor]:
    """Experts that the layers are called with."""
    found: list[Tensor] = []
    for layer in model.layers.values():
        layer.moe.routed_experts.register_forward_pre_hook(lambda _, given: found.append(given[2].flatten(0, 1)))
    return found


@pytest.mark.parametrize("name", [None, *OURS])
def test_record_and_replay(name: str | None) -> None:
    model, tokens = model_of(overridden(*([name] if name else []))), batch(1)
    seen = record_called_experts(model)
    with routing.record(model) as choices:
        loss_of(model, tokens)
    assert list(choices) == LAYERS and all(map(torch.equal, [one.long() for one in choices.values()], seen))
    given = given_for(16)
    seen.clear()
    with routing.replay(model, given):
        loss = loss_of(model, tokens)
    assert all(map(torch.equal, seen, given))
    loss.backward()
    gate = model.layers["0"].moe.router.gate.weight.grad
    assert gate is not None and gate.abs().sum() > 0


def test_replay_computes_weights_from_live_scores() -> None:
    router = model_of(overridden()).layers["0"].moe.router.double()
    x = torch.randn(2, 5, titan.DIM, dtype=torch.float64)
    (given,) = given_for(10)[:1]
    with routing.replay(router, [given]):
        weight, number, score = router(x)
    assert torch.equal(number.flatten(0, 1), given)
    wanted = score.flatten(0, 1).gather(1, given)
    wanted = 1.5 * wanted / wanted.sum(1, keepdim=True)
    torch.testing.assert_close(weight.flatten(0, 1), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC, fusedmoe.titan.SelectiveAC])
def test_replay_under_activation_checkpointing(policy: Any) -> None:
    batches, given, found = [batch(1), batch(2)], given_for(32), []
    for checked in (False, True):
        model = model_of(overridden(OURS[1]))
        if checked:
            policy.Config().build().apply(model)
        with routing.replay(model, given):
            losses = [loss_of(model, tokens) for tokens in batches]
        for loss in losses:
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
        assert list(routing.find_routers(model)) == LAYERS
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_forced_load_balance_is_rejected() -> None:
    model = model_of(overridden())
    model.layers["1"].moe.router._debug_force_load_balance = True
    with pytest.raises(ConfigError, match="layers.1.moe.router uses experts other"), routing.record(model):
        loss_of(model, batch(1))


def replay_on_tensor_parallel_ranks(rank: int, world: int, ep: int) -> None:
    """Replay on tensor-parallel ranks: scores are a DTensor, and each rank holds the choices of its part."""
    set_spmd_backend("partial_dtensor")
    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "dp_shard": 1, "tp": world, "ep": ep}
    dims = ParallelDims(**sizes, world_size=world, spmd_backend="partial_dtensor")
    made = titan.config()
    set_qwen3_sharding_config(made, enable_sp=True, enable_ep=ep > 1)
    cfg = made.layers[1].moe
    cfg.routed_experts = fusedmoe.titan.routed_experts(cfg.routed_experts)
    torch.manual_seed(2)
    module = cfg.build()
    module.init_states()
    whole = deepcopy(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        module.parallelize(dims)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4 * world, titan.DIM, generator=generator)
    given = torch.rand(2, 4 * world, EXPERTS, generator=generator).topk(K).indices
    given[0, 0] = -1
    with routing.replay(whole, [given.flatten(0, 1)]), routing.record(whole) as chosen:
        exact = whole(x)
    part, (seen,) = x.chunk(world, 1)[rank].clone(), chosen.values()
    # Without expert parallelism each of the ranks routes the whole sequence.
    own = [choices.chunk(world, 1)[rank] if ep > 1 else choices for choices in (given, seen.view(given.shape))]
    with routing.record(module) as found, routing.replay(module, [own[0].flatten(0, 1)]):
        y = module(part)
    assert torch.equal(found["router"], own[1].flatten(0, 1))
    y = y.full_tensor()
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    exact.square().sum().backward()
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
def test_replay_on_ranks_sharing_sequence(cluster: Cluster, ep: int) -> None:
    cluster.run(2, replay_on_tensor_parallel_ranks, ep)
