"""Blocks of torchtitan in micro-batches: losses and gradients equal those of the blocks without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
from torchtitan.models.gpt_oss.model import GptOssTransformerBlock
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

import fusedmoe.titan
from fusedmoe.blocks.cuts import ExternalCall
from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_in
from fusedmoe.titan import FAMILIES
from tests.cluster import Cluster
from tests.integrations.plans_run import forwards_of
from tests.integrations.test_titan import DIM, batch, config
from tests.integrations.test_titan_gpt_oss import config as gpt_oss_experts
from tests.integrations.test_titan_schedule import CASES, parallel


def compare(
    rank: int, world: int, sizes: dict[str, int], degrees: Sequence[tuple[int, int]], cases: Sequence[str]
) -> None:
    # One sample on one rank, three on another.
    tokens = [batch(step, 2 * world + 1)[: (3, 1)[(rank + step) % 2]] for step in range(2)]
    model, context = parallel(rank, world, None, sizes)
    for exchange in exchanges_in(model):
        exchange.set_schedule("off")
    assert any(isinstance(module, FSDPModule) for module in model.modules())
    for name in cases:
        with context():
            wanted = CASES[name](model, tokens)
        for each in degrees:
            names = list(model.state_dict())
            (blocks,) = fusedmoe.titan.pipeline(model, each)
            assert list(model.state_dict()) == names
            ran = forwards_of(blocks)
            with context():
                values = CASES[name](model, tokens)
            assert len(ran) == (2 if name in ("accumulated", "no sync") else 1), name
            assert fusedmoe.titan.pipeline(model, None) == []
            assert wanted.keys() == values.keys()
            for key, value in wanted.items():
                if name == "autocast":
                    error = (values[key] - value).norm()
                    assert float(error) < 1e-2 * max(float(value.norm()), 1e-3), (name, key)
                else:
                    torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_micro_batched_blocks_equal_plain_blocks(cluster: Cluster) -> None:
    cluster.run(2, compare, {"dp_shard": 2, "tp": 1, "ep": 2}, [(2, 3)], ("accumulated",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_micro_batched_blocks_in_every_trainer_case(cluster: Cluster) -> None:
    cluster.run(2, compare, {"dp_shard": 2, "tp": 1, "ep": 2}, [(2, 2), (3, 2)], tuple(CASES))


class MeanAttention(nn.Module):
    """Stand-in for attention, which needs GPUs in some families: the mean of the earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x_BLD: Tensor, masks: Any, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        return self.out(x_BLD).cumsum(1) / (positions[..., None] + 1)


class Blocks(nn.Module):
    """Model without FSDP, of blocks of one class, with torchtitan's or gpt-oss's experts."""

    def __init__(self, kind: Any, world: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in range(5):
            block = kind.__new__(kind)
            nn.Module.__init__(block)
            block.attention, block.feed_forward, block.attn_mask_key = MeanAttention(), nn.Linear(DIM, DIM), ""
            block.attention_norm, block.ffn_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            # All of gpt-oss's blocks have experts; in the other models some blocks have none.
            block.moe_enabled = number in (1, 2, 4) or kind is GptOssTransformerBlock
            if block.moe_enabled:
                moe = config().layers[1].moe
                if kind is GptOssTransformerBlock:
                    moe.routed_experts = gpt_oss_experts()
                moe.routed_experts = fusedmoe.titan.routed_experts(moe.routed_experts, timeout_s=40.0)
                block.moe = moe.build()
                block.moe.init_states()
                routed = block.moe.routed_experts
                routed.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,)))
                for part in routed.inner_experts.parameters():
                    part.data = part.data.chunk(world)[rank].clone()
            self.layers[str(number)] = block

    def forward(self, x_BLD: Tensor) -> Tensor:
        positions = torch.arange(x_BLD.shape[1]).expand(x_BLD.shape[:2])
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, None, positions)
        return x_BLD


def compare_families(rank: int, world: int) -> None:
    for kind in (DeepSeekV3TransformerBlock, GptOssTransformerBlock, Qwen3TransformerBlock):
        assert kind.__name__ in FAMILIES
        torch.manual_seed(0)
        model = Blocks(kind, world, rank).double()
        x = torch.randn((3, 1)[rank % 2], 5 + rank, DIM, dtype=torch.float64)
        for degrees in ((2, 2), (1, 1), (3, 3)):
            found = {}
            for name, given in (("plain", None), ("blocks", degrees)):
                made = fusedmoe.titan.pipeline(model, given)
                ran = [forwards_of(blocks) for blocks in made]
                x.requires_grad_().grad = None
                model.zero_grad()
                y = model(x)
                y.square().mean().backward()
                runs = 1 if kind is GptOssTransformerBlock else 2
                assert [len(each) for each in ran] == ([1] * runs if given else [])
                grads = {key: part.grad for key, part in model.named_parameters() if part.grad is not None}
                found[name] = {"y": y, "dx": x.grad, **grads}
            assert found["blocks"].keys() == found["plain"].keys() and len(grads) > 30
            for key, value in found["plain"].items():
                torch.testing.assert_close(found["blocks"][key], value, rtol=1e-10, atol=1e-10)
        fusedmoe.titan.pipeline(model, None)
        assert not any("forward" in vars(layer) for layer in model.layers.values())


def call_unsupported(rank: int, world: int) -> None:
    model, context = parallel(rank, world, activation_checkpoint.FullAC.Config(), {"dp_shard": 2, "tp": 1, "ep": 2})
    with pytest.raises(ConfigError, match="layers.0 is a .*Checkpoint.*recompute=True replaces activation checkpoints"):
        fusedmoe.titan.pipeline(model)
    model = Blocks(Qwen3TransformerBlock, world, rank)
    fusedmoe.titan.pipeline(model)
    x = torch.randn(2, 3, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.titan._is_type_checking", lambda: True)
        with pytest.raises(ConfigError, match="layers.1.*type checks.*spmd_typechecking"):
            model(x)
    model.layers["2"].compile(backend="eager")
    with pytest.raises(ConfigError, match="layers.2 in micro-batches: it is compiled"):
        model(x)
    with pytest.raises(ConfigError, match="different degrees|one degree for both passes"):
        fusedmoe.titan.pipeline(Blocks(GptOssTransformerBlock, world, rank), (2, 3))


@pytest.mark.slow
def test_micro_batched_block_families_equal_plain(cluster: Cluster) -> None:
    cluster.run(2, compare_families)


@pytest.mark.slow
def test_unsupported_blocks_raise(cluster: Cluster) -> None:
    cluster.run(2, call_unsupported)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("ep", [2, 4])
def test_micro_batched_blocks_equal_plain_on_four_ranks(cluster: Cluster, ep: int) -> None:
    cluster.run(4, compare, {"dp_shard": 4, "tp": 1, "ep": ep}, [(2, 3)], tuple(CASES), timeout_s=300)


@pytest.mark.slow
def test_block_mask_is_sliced_with_its_samples() -> None:
    """`BlockMask`s index samples by number."""
    lengths = torch.tensor([3, 130, 200])
    mask = create_block_mask(lambda b, h, q, kv: kv < lengths[b], 3, None, 200, 200, device="cpu")
    q, k, v = torch.randn(3, 3, 2, 200, 16).unbind(0)
    whole = flex_attention(q, k, v, block_mask=mask)
    call = ExternalCall("a block", 3, (mask, {"positions": torch.arange(600).view(3, 200)}), {"scale": 2.0})
    for at in (slice(0, 1), slice(1, 3)):
        (part, named), kwargs = call.samples(at)
        torch.testing.assert_close(flex_attention(q[at], k[at], v[at], block_mask=part), whole[at])
        assert named["positions"].tolist() == torch.arange(600).view(3, 200)[at].tolist() and kwargs == {"scale": 2.0}
