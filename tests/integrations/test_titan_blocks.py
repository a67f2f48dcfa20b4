"""Blocks of torchtitan in micro-batches: losses and gradients are those of the blocks one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import activation_checkpoint

import fusedmoe.titan
from fusedmoe import PipelinedBlocks
from fusedmoe.blocks.external_blocks import ExternalCall
from fusedmoe.dispatchers import exchanges_of
from fusedmoe.errors import ConfigError
from tests.cluster import Cluster
from tests.integrations.test_titan import EXPERTS, OURS, batch, config, model_of
from tests.integrations.test_titan_schedule import CASES, parallel


def compare(
    rank: int, world: int, sizes: dict[str, int], degrees: Sequence[tuple[int, int]], cases: Sequence[str]
) -> None:
    # One sample on one rank, three on another.
    tokens = [batch(step, 2 * world + 1)[: (3, 1)[(rank + step) % 2]] for step in range(2)]
    model, context = parallel(rank, world, None, sizes)
    for exchange in exchanges_of(model):
        exchange.set_schedule("off")
    assert any(isinstance(module, FSDPModule) for module in model.modules())
    for name in cases:
        with context():
            wanted = CASES[name](model, tokens)
        for each in degrees:
            names = list(model.state_dict())
            (blocks,) = fusedmoe.titan.pipeline(model, each)
            assert list(model.state_dict()) == names
            ran: list[PipelinedBlocks] = []
            blocks.register_forward_hook(lambda module, *_: ran.append(module))
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


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_two_ranks(cluster: Cluster) -> None:
    cluster.run(2, compare, {"dp_shard": 2, "tp": 1, "ep": 2}, [(2, 3)], ("accumulated",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_all_cases(cluster: Cluster) -> None:
    cluster.run(2, compare, {"dp_shard": 2, "tp": 1, "ep": 2}, [(2, 2), (3, 2)], tuple(CASES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("ep", [2, 4])
def test_four_ranks(cluster: Cluster, ep: int) -> None:
    cluster.run(4, compare, {"dp_shard": 4, "tp": 1, "ep": ep}, [(2, 3)], tuple(CASES), timeout_s=300)


def test_a_mask_of_blocks_goes_with_its_samples() -> None:
    """`BlockMask`s know samples by number."""
    lengths = torch.tensor([3, 130, 200])
    mask = create_block_mask(lambda b, h, q, kv: kv < lengths[b], 3, None, 200, 200, device="cpu")
    q, k, v = torch.randn(3, 3, 2, 200, 16).unbind(0)
    whole = flex_attention(q, k, v, block_mask=mask)
    call = ExternalCall("a block", 3, (mask, {"positions": torch.arange(600).view(3, 200)}), {"scale": 2.0})
    for at in (slice(0, 1), slice(1, 3)):
        (part, named), kwargs = call.samples(at)
        torch.testing.assert_close(flex_attention(q[at], k[at], v[at], block_mask=part), whole[at])
        assert named["positions"].tolist() == torch.arange(600).view(3, 200)[at].tolist() and kwargs == {"scale": 2.0}
