"""Expert choices in Megatron's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron.core is not installed")

import torch
from megatron.core.tensor_parallel import checkpoint as megatron_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedmoe import ConfigError, routing
from tests.cluster import Cluster
from tests.integrations.test_megatron import EXPERTS, OURS, K, config, layer_of, megatron, tokens


def given_for(count: int, seed: int) -> Tensor:
    given = torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(K).indices
    given[0] = -1
    return given


def maps(layer: Any) -> list[Tensor]:
    """A layer's router output: the routing map [T, E]."""
    found: list[Tensor] = []
    layer.router.register_forward_hook(lambda _, given, output: found.append(output[1].flatten(0, -2)))
    return found


def check_record_and_replay(rank: int, world: int, ours: Any, **more: Any) -> None:
    # Losses and expert biases run a separate top-k of their own.
    cfg = config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, **more)
    layer, x = layer_of(cfg, ours), tokens(9, rank)
    seen = maps(layer)
    with routing.record(layer) as choices:
        layer(x)
    assert list(choices) == ["router"]
    assert torch.equal(torch.zeros(9, EXPERTS).scatter(1, choices["router"].long(), 1).bool(), seen[-1])
    given = given_for(9, rank)
    with routing.replay(layer, [given]), routing.record(layer) as replayed:
        layer(x)
    wanted = torch.where(given < 0, choices["router"].long(), given)
    assert torch.equal(replayed["router"].long(), wanted)
    assert torch.equal(torch.zeros(9, EXPERTS).scatter(1, wanted, 1).bool(), seen[-1])
    grads = []
    for around in (lambda f, x: f(x), lambda f, x: megatron_checkpoint(f, False, x),
                   lambda f, x: checkpoint(f, x, use_reentrant=False)):  # fmt: skip
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with routing.replay(layer, [given]):
            y = around(lambda x: layer(x)[0], leaf)
        y.square().sum().backward()
        assert torch.equal(torch.zeros(9, EXPERTS).scatter(1, wanted, 1).bool(), seen[-1])
        grads.append([leaf.grad, layer.router.weight.grad])
    for other in grads[1:]:
        for one, two in zip(grads[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)


def fused_top_k(layer: Any) -> None:
    """Transformer Engine's top-k bypasses replay."""

    def fused(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
        value, index = logits.sort(1, descending=True)
        index, value = index[:, :topk], value[:, :topk].softmax(1)
        empty = torch.zeros_like(logits)
        return empty.scatter(1, index, value), empty.scatter(1, index, 1).bool()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.transformer.moe.moe_utils.HAVE_TE", True)
        patch.setattr("megatron.core.transformer.moe.moe_utils.fused_topk_with_score_function", fused, raising=False)
        layer.config.moe_router_fusion = True
        for context in (routing.record(layer), routing.replay(layer, [given_for(9, 1)])):
            with pytest.raises(ConfigError, match="router uses experts other .* moe_router_fusion"), context:
                layer(tokens(9, 1))
        layer.config.moe_router_fusion = False


@contextmanager
def without_cuda(**sizes: int) -> Iterator[None]:
    """Megatron's checkpoints also store the states of CUDA's generators."""
    with megatron(**sizes), pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda **_: None)
        patch.setattr("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None)
        yield


def check_all_layers_on_one_rank(rank: int, world: int) -> None:
    with without_cuda():
        for ours in (None, *OURS):
            check_record_and_replay(rank, world, ours)
            check_record_and_replay(
                rank, world, ours, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
            )
            check_record_and_replay(rank, world, ours, moe_router_num_groups=2, moe_router_group_topk=2)
        fused_top_k(layer_of(config()))


def check_layers_over_ranks(rank: int, world: int) -> None:
    with without_cuda(expert_model_parallel_size=world):
        for ours in OURS:
            check_record_and_replay(rank, world, ours, expert_model_parallel_size=world)


def test_record_and_replay_on_one_rank(world: None) -> None:
    check_all_layers_on_one_rank(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_record_and_replay_with_expert_parallelism(cluster: Cluster, world: int) -> None:
    cluster.run(world, check_layers_over_ranks)
