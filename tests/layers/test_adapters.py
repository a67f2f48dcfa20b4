"""Low-rank adapters of a layer's experts, compared with summed matrices in float64, in one process and over ranks."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fusedmoe import MoELayer, Schedule, Topology, gates
from fusedmoe.errors import ConfigError
from fusedmoe.experts import Custom, FeedForward, SwiGLU, add_adapters, merge_adapters
from fusedmoe.experts.adapters import LowRankUpdate
from fusedmoe.experts.sharding import parameter_shardings
from fusedmoe.training import ShardedExperts, sync_gradients
from tests.cluster import Cluster
from tests.marks import slowly

E, M, H, T = 4, 6, 8, 11


def build(
    kind: str = "swiglu", topology: Topology | None = None, names: Any = ("w1", "w2"), **options: Any
) -> MoELayer:
    """Build a layer in float64 with nonzero adapters; every rank builds the same values."""
    torch.manual_seed(3)
    networks = {"swiglu": lambda: SwiGLU(H), "biased": lambda: FeedForward(H, "gelu", bias=True)}
    layer = MoELayer(M, gates.TopK(E, k=2), networks[kind](), topology=topology, dtype=torch.float64, **options)
    add_adapters(layer.experts, 2, alpha=3.0, names=names)
    return layer


def randomize_adapters(layer: MoELayer) -> MoELayer:
    for name, parameter in layer.experts.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter)
    return layer


def without_separate_factors() -> Any:
    """Context in which parameters are read as the sums that PyTorch's parametrisation computes."""
    return patch("fusedmoe.experts.networks.frozen_weights_and_adapters", return_value=None)


def output_and_gradients(layer: MoELayer, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.parametrize("kind", ["swiglu", "biased"])
@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2")])
def test_adapters_equal_summed_weights(kind: str, names: Any) -> None:
    layer, x = randomize_adapters(build(kind, names=names)), torch.randn(T, M, dtype=torch.float64)
    with patch.object(LowRankUpdate, "forward", side_effect=AssertionError("summed")):
        got = output_and_gradients(layer, x)
    with without_separate_factors():
        wanted = output_and_gradients(layer, x)
    assert len(got) == len(wanted) == 2 + 1 + 2 * len(names)  # gate and factors
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=1e-12)


def test_merged_loaded_and_copied_adapters_keep_results() -> None:
    """Merged experts compute the same; a state loads with adapters; copies and pickles keep the adapters."""
    layer, x = randomize_adapters(build("biased")), torch.randn(T, M, dtype=torch.float64)
    y, shardings = layer(x), dict(parameter_shardings(layer))
    assert shardings["experts.parametrizations.w1.0.a"] == {"ep": 0}
    other = build("biased")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y) and torch.equal(copy.deepcopy(layer)(x), y)
    plain = parameter_shardings(MoELayer(M, gates.TopK(E, k=2), FeedForward(H, "gelu", bias=True)))
    merge_adapters(layer.experts)
    assert not parametrize.is_parametrized(layer.experts) and parameter_shardings(layer) == plain
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)
    merge_adapters(layer.experts)  # nothing left to merge


def test_other_parametrizations_and_trainable_weights_are_evaluated() -> None:
    x = torch.randn(T, M, dtype=torch.float64)
    layer = randomize_adapters(build())
    y = layer(x)
    layer.experts.parametrizations.w1.original.requires_grad_()
    got = output_and_gradients(layer, x)
    assert layer.experts.parametrizations.w1.original.grad is not None
    torch.testing.assert_close(got[0], y, rtol=0, atol=1e-12)
    parametrize.register_parametrization(layer.experts, "w2", torch.nn.Softplus())
    assert not torch.allclose(layer(x), y)


@pytest.mark.parametrize("bias", ["b1", "b2"])
def test_adapter_hooks_and_parametrized_biases_take_effect(bias: str) -> None:
    """Reading factors separately would skip a hook on an adapter; a parametrised bias is evaluated once."""
    x = torch.randn(T, M, dtype=torch.float64)
    layer = randomize_adapters(build("biased"))
    layer.experts.parametrizations.w1[0].register_forward_hook(lambda _, __, w: w * 2)
    with torch.no_grad():
        found, wanted = layer(x), randomize_adapters(build("biased"))
        wanted.load_state_dict(layer.state_dict())
        doubled = wanted.experts.parametrizations.w1
        doubled.original.mul_(2)
        doubled[0].b.mul_(2)
        torch.testing.assert_close(found, wanted(x), rtol=1e-12, atol=1e-12)
    calls = []
    doubling = torch.nn.Module()
    doubling.forward = lambda b: (calls.append(1), b * 2)[1]  # type: ignore[method-assign]
    parametrize.register_parametrization(wanted.experts, bias, doubling)
    calls.clear()
    wanted(x)
    assert len(calls) == 1


def test_adapters_under_bfloat16_autocast() -> None:
    layer, x = randomize_adapters(build()).float(), torch.randn(T, M)
    with torch.autocast("cpu", torch.bfloat16):
        got = output_and_gradients(layer, x)
        with without_separate_factors():
            wanted = output_and_gradients(layer, x)
    for value, right in zip(got, wanted, strict=True):
        assert value.dtype == right.dtype
        torch.testing.assert_close(value, right, rtol=0, atol=0.05 * float(right.abs().max()))


def test_add_adapters_rejects_invalid_arguments() -> None:
    layer = build()
    for given in ({"experts": SwiGLU(H)}, {"experts": Custom(torch.nn.Linear)}, {"rank": 0}, {"names": ["b1"]}, {}):
        with pytest.raises(ConfigError, match="adapters|already parametrised"):
            add_adapters(**{"experts": layer.experts, "rank": 2, **given})


def shard_of(whole: Tensor, axes: dict[str, int], topology: Topology) -> Tensor:
    for axis, dim in axes.items():
        group = getattr(topology, axis)
        whole = whole.chunk(group.size, dim)[group.index]
    return whole


def compare_with_one_process(
    rank: int, world: int, kind: str, sizes: dict[str, int], tokens: list[Tensor], scheduled: bool
) -> None:
    """Compare outputs and gradients of each rank's tokens and factors with one process."""
    schedule = {"schedule": Schedule("pipemoe", degrees=(2, 3))} if scheduled else {}
    with Topology.from_sizes(**sizes) as topology:
        layer, alone = build(kind, topology, **schedule), build(kind)
        shardings = parameter_shardings(layer)
        for (name, own), (_, whole) in zip(layer.named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(own.detach(), shard_of(whole, shardings.get(name, {}), topology).detach())
        randomize_adapters(alone)
        with torch.no_grad():
            for (name, own), whole in zip(layer.named_parameters(), alone.parameters(), strict=True):
                own.copy_(shard_of(whole, shardings.get(name, {}), topology))
        with patch.object(LowRankUpdate, "forward", side_effect=AssertionError("summed")):
            y = layer(tokens[rank])
            y.pow(2).sum().backward()
        sync_gradients(layer, topology)
        wanted = [alone(each) for each in tokens]
        torch.stack([each.pow(2).sum() for each in wanted]).sum().div(topology.dp.size).backward()
        torch.testing.assert_close(y, wanted[rank], rtol=0, atol=1e-10)
        for (name, own), whole in zip(layer.named_parameters(), alone.parameters(), strict=True):
            assert (own.grad is None) == (whole.grad is None) == ("original" in name or name.endswith((".b1", ".b2")))
            if own.grad is not None:
                right = shard_of(whole.grad, shardings.get(name, {}), topology)
                torch.testing.assert_close(own.grad, right, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("sizes", "scheduled"), [({"ep": 2}, True), ({"esp": 2}, False), *slowly(({"ep": 2}, False), ({"esp": 2}, True))]
)
def test_adapters_on_two_ranks_equal_one_process(cluster: Cluster, sizes: dict[str, int], scheduled: bool) -> None:
    """Split experts, and experts whose shards share a factor; through operators, and in chunks with a plan."""
    tokens = [torch.randn(count, M, dtype=torch.float64) for count in (5, 9)]
    cluster.run(2, compare_with_one_process, "swiglu" if scheduled else "biased", sizes, tokens, scheduled)


@pytest.mark.slow
def test_adapters_on_four_ranks_equal_one_process(cluster: Cluster) -> None:
    tokens = [torch.randn(count, M, dtype=torch.float64) for count in (5, 0, 9, 1)]
    cluster.run(4, compare_with_one_process, "biased", {"ep": 2, "esp": 2}, tokens, False)


def train_with_placement(rank: int, world: int, placement: Any) -> tuple[list[float], int]:
    """Return the losses of several steps, and the bytes of experts that this rank sent."""
    topology = Topology.from_sizes(ep=world, timeout_s=60)
    torch.manual_seed(3)
    layer = MoELayer(10, gates.TopK(4, 2), SwiGLU(12), topology=topology, placement=placement, dtype=torch.float64)
    add_adapters(layer.experts, rank=3, alpha=2)
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=0.05)
    sharded = ShardedExperts(layer, optimizer, topology, memory=2, overlap=2) if placement == "fssdp" else None
    losses = []
    for step in range(8):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(9 + 4 * rank, 10, dtype=torch.float64) + 2
        optimizer.zero_grad(set_to_none=True)
        loss = layer(x).square().mean() + 0.01 * layer.aux_loss
        loss.backward()
        sync_gradients(layer, topology)
        optimizer.step()
        losses.append(float(loss.detach()))
    if sharded is None or layer.placed is None:
        return losses, 0
    sharded.close()
    return losses, layer.placed.replicas.sent_bytes


def test_moved_experts_keep_their_adapters(cluster: Cluster) -> None:
    still, moving = (cluster.run(2, train_with_placement, placement) for placement in ("ep", "fssdp"))
    for (right, _), (losses, sent) in zip(still, moving, strict=True):
        assert losses == pytest.approx(right, rel=1e-10, abs=1e-10) and sent
