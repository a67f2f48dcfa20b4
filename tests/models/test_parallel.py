"""A model split over ranks: same parameters, loss and gradients as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe.comm.topology import Topology
from fusedmoe.experts.sharding import parameter_shardings
from fusedmoe.layers.moe import MoELayer
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import TokenSplit
from fusedmoe.models.transformer import IGNORE, Transformer
from fusedmoe.training import sync_gradients
from tests.cluster import Cluster
from tests.marks import slowly

TOLERANCE = 1e-10
AUX = 0.3
BATCH, LENGTH = 3, 5  # unevenly split positions: over four ranks, one rank has none

GPT: dict[str, Any] = dict(
    layers=2,
    model_dim=16,
    heads=8,
    kv_heads=4,
    hidden=12,
    experts=4,
    k=2,
    capacity_factor=1.0,
    norm="rms",
    positions="rope",
    seq_len=LENGTH,
)
BERT: dict[str, Any] = dict(
    objective="masked",
    layers=2,
    model_dim=12,
    heads=4,
    hidden=8,
    experts=8,
    k=3,
    capacity_factor=None,
    norm="layer",
    positions="learned",
    bias=True,
    expert="ffn",
    moe_every=2,
    shared_hidden=4,
    seq_len=LENGTH,
)
LAYOUTS = [dict(ep=2, esp=2, mp=2), dict(ep=4, esp=1, mp=1), dict(ep=1, esp=4, mp=4), dict(ep=2, esp=1, mp=4)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=() if place % 2 == number and place < 2 else pytest.mark.slow)
        for place, layout in enumerate(LAYOUTS)
        for number, model in enumerate((GPT, BERT))
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if "ep" in value else value.get("objective", "gpt"),
)
def test_four_ranks_equal_one_rank(cluster: Cluster, model: dict[str, Any], layout: dict[str, int]) -> None:
    seed = int(torch.randint(2**31, ()))
    cluster.run(4, compare_with_one_rank, seed, model, layout, {})


def test_latent_attention_and_leading_dense_blocks_on_four_ranks_equal_one(cluster: Cluster) -> None:
    seed = int(torch.randint(2**31, ()))
    latent = {"head_dim": 6, "q_rank": 5, "kv_rank": 7, "rope_dim": 2, "value_dim": 3, "kv_heads": 8}
    model = GPT | latent | {"layers": 3, "dense_layers": 1, "dense_hidden": 10, "vocab_size": 300}
    cluster.run(4, compare_with_one_rank, seed, model, dict(ep=2, esp=2, mp=2), {})


def test_hash_gate_routes_by_bytes_of_local_rank(cluster: Cluster) -> None:
    seed = int(torch.randint(2**31, ()))
    model = GPT | {"gate": "hash", "k": 1, "capacity_factor": None}
    cluster.run(4, compare_with_one_rank, seed, model, dict(ep=2, esp=1, mp=4), {})


@pytest.mark.parametrize(
    "options", [{"recompute": True}, *slowly({"dispatch": "2dh"}, {"dispatch": "1dh"})], ids=["recompute", "2dh", "1dh"]
)
def test_recompute_and_dispatch_options_preserve_results(cluster: Cluster, options: dict[str, Any]) -> None:
    seed = int(torch.randint(2**31, ()))
    cluster.run(4, compare_with_one_rank, seed, GPT, dict(ep=4, esp=1, mp=2), options)


@pytest.mark.parametrize("length", [5, *slowly(8, 7, 1)])
def test_block_output_is_independent_of_other_samples(cluster: Cluster, length: int) -> None:
    """A block's output for some samples does not depend on the other samples; a rank's rows are its positions."""
    seed = int(torch.randint(2**31, ()))
    cluster.run(4, compare_samples, seed, length)


def compare_samples(rank: int, world: int, seed: int, length: int) -> None:
    topology = Topology.from_sizes(ep=2, esp=1, mp=4, ranks_per_node=2)
    config = ModelConfig(**BERT | {"seq_len": length})  # a block without experts, then one with them, no token dropped
    split = TokenSplit.from_length(length, topology)
    torch.manual_seed(seed)
    mine = Transformer(config, topology, dtype=torch.float64)
    torch.manual_seed(seed)
    whole = Transformer(config, dtype=torch.float64)
    torch.manual_seed(seed)
    x_BLM = torch.randn(4, length, config.model_dim, dtype=torch.float64)
    for block, other in zip(mine.blocks, whole.blocks, strict=True):
        for samples in (slice(0, 4), slice(1, 3), slice(3, 4), slice(0, 0)):
            x_BPM = x_BLM[samples, split.start : split.stop].clone().requires_grad_()
            theirs = x_BLM[samples].clone().requires_grad_()
            y_BPM, _ = block(x_BPM, split)
            expected, _ = other(theirs, TokenSplit.from_length(length, whole.topology))
            close("output", y_BPM.detach(), expected[:, split.start : split.stop].detach())
            y_BPM.square().sum().backward()
            expected.square().sum().backward()
            assert x_BPM.grad is not None and theirs.grad is not None
            close("gradient", x_BPM.grad, theirs.grad[:, split.start : split.stop])


def compare_with_one_rank(
    rank: int, world: int, seed: int, model: dict[str, Any], layout: dict[str, int], options: dict[str, Any]
) -> None:
    topology = Topology.from_sizes(**layout, ranks_per_node=2)
    config = ModelConfig(**model)
    torch.manual_seed(seed)
    split = Transformer(config, topology, dtype=torch.float64, **options)
    torch.manual_seed(seed)
    whole = Transformer(config, dtype=torch.float64)
    batches = [batch_of(config, seed, replica) for replica in range(topology.dp.size)]

    mine = split(*batches[topology.dp.index])
    (mine.nats + AUX * mine.aux).backward()
    sync_gradients(split, topology)

    if config.gate != "hash":  # hash gate: tokens do not compete for capacity
        for layer in whole.moe_layers():
            route_slice_by_slice(layer, topology.mp.size)
    theirs = [whole(*batch) for batch in batches]
    loss = sum(each.nats + AUX * each.aux for each in theirs) / len(theirs)
    assert isinstance(loss, Tensor)
    loss.backward()

    expected = theirs[topology.dp.index]
    parts = torch.stack([mine.nats, mine.aux]).detach()
    if topology.mp.handle is not None:
        torch.distributed.all_reduce(parts, group=topology.mp.handle)
    close("loss", parts, torch.stack([expected.nats, expected.aux]).detach())
    assert mine.targets == expected.targets
    shardings = parameter_shardings(split)
    others = dict(whole.named_parameters())
    assert others.keys() == dict(split.named_parameters()).keys()
    for name, parameter in split.named_parameters():
        other = others[name]
        assert parameter.grad is not None and other.grad is not None, name
        axes = shardings.get(name, {})
        torch.testing.assert_close(parameter, shard_of(other, axes, topology), rtol=0, atol=0)
        close(f"gradient of {name}", parameter.grad, shard_of(other.grad, axes, topology))


def batch_of(config: ModelConfig, seed: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + replica + 1)
    tokens, targets = torch.randint(256, (2, BATCH, LENGTH), generator=generator)
    if config.objective == "masked":  # replicas with a different number of targets
        targets[torch.rand(BATCH, LENGTH, generator=generator) < 0.3 * (replica + 1)] = IGNORE
        targets[0, 0] = 7
    return tokens, targets


def route_slice_by_slice(layer: MoELayer, slices: int) -> None:
    """Make a layer route like `slices` ranks: each routes its own positions of all samples, with its own capacity."""
    whole = layer.forward

    def forward(x_BLM: Tensor) -> Tensor:
        parts, aux = [], torch.zeros((), dtype=x_BLM.dtype)
        for part in x_BLM.chunk(slices, dim=1):
            parts.append(whole(part))
            aux = aux + layer.aux_loss / slices
        layer.aux_loss = aux
        return torch.cat(parts, dim=1)

    layer.forward = forward  # type: ignore[method-assign]


def shard_of(tensor: Tensor, axes: dict[str, int], topology: Topology) -> Tensor:
    for axis, dim in axes.items():
        group = getattr(topology, axis)
        size = -(-tensor.shape[dim] // group.size)
        parts = tensor.split(size, dim)
        tensor = parts[group.index] if group.index < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


def close(what: str, actual: Tensor, expected: Tensor) -> None:
    scale = max(1e-3, float(expected.abs().max()) if expected.numel() else 1.0)
    error = float((actual - expected).abs().max()) if expected.numel() else 0.0
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.2e} where values reach {scale:.2e}"
