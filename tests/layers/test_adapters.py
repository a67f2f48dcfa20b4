"""Low-rank adapters of a layer's experts, against the sums of matrices in float64, in one process and over ranks."""

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
from fusedmoe.experts import (
    Custom,
    FeedForward,
    LowRankUpdate,
    SwiGLU,
    add_adapters,
    merge_adapters,
    parameter_shardings,
)
from fusedmoe.training import ShardedExperts, sync_gradients
from tests.cluster import Cluster
from tests.marks import slowly

E, M, H, T = 4, 6, 8, 11


def build(
    kind: str = "swiglu", topology: Topology | None = None, names: Any = ("w1", "w2"), **options: Any
) -> MoELayer:
    """A layer in float64 whose adapters have values, the same whoever builds it."""
    torch.manual_seed(3)
    networks = {"swiglu": lambda: SwiGLU(H), "biased": lambda: FeedForward(H, "gelu", bias=True)}
    layer = MoELayer(M, gates.TopK(E, k=2), networks[kind](), topology=topology, dtype=torch.float64, **options)
    add_adapters(layer.experts, 2, alpha=3.0, names=names)
    return layer


def fill(layer: MoELayer) -> MoELayer:
    for name, parameter in layer.experts.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter)
    return layer


def summed() -> Any:
    """Inside, parameters are read as the sums that PyTorch's parametrisation makes."""
    return patch("fusedmoe.experts.networks.adapted", return_value=None)


def numbers(layer: MoELayer, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.parametrize("kind", ["swiglu", "biased"])
@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2")])
def test_one_process(kind: str, names: Any) -> None:
    layer, x = fill(build(kind, names=names)), torch.randn(T, M, dtype=torch.float64)
    with patch.object(LowRankUpdate, "forward", side_effect=AssertionError("summed")):
        got = numbers(layer, x)
    with summed():
        wanted = numbers(layer, x)
    assert len(got) == len(wanted) == 2 + 1 + 2 * len(names)  # of the gate, and the factors
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=1e-12)


def test_merge_and_state() -> None:
    """Merged experts compute the same; a state loads with adapters, and copies and pickles keep them."""
    layer, x = fill(build("biased")), torch.randn(T, M, dtype=torch.float64)
    y, shardings = layer(x), dict(parameter_shardings(layer))
    assert shardings["experts.parametrizations.w1.0.a"] == {"ep": 0}
    other = build("biased")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y) and torch.equal(copy.deepcopy(layer)(x), y)
    plain = parameter_shardings(MoELayer(M, gates.TopK(E, k=2), FeedForward(H, "gelu", bias=True)))
    merge_adapters(layer.experts)
    assert not parametrize.is_parametrized(layer.experts) and parameter_shardings(layer) == plain
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)
    merge_adapters(layer.experts)  # nothing is left to merge


def test_other_parametrisations_and_trained_weights_are_read() -> None:
    x = torch.randn(T, M, dtype=torch.float64)
    layer = fill(build())
    y = layer(x)
    layer.experts.parametrizations.w1.original.requires_grad_()
    got = numbers(layer, x)
    assert layer.experts.parametrizations.w1.original.grad is not None
    torch.testing.assert_close(got[0], y, rtol=0, atol=1e-12)
    parametrize.register_parametrization(layer.experts, "w2", torch.nn.Softplus())
    assert not torch.allclose(layer(x), y)


@pytest.mark.parametrize("bias", ["b1", "b2"])
def test_hooks_and_parametrised_biases(bias: str) -> None:
    """Reading factors apart would skip a hook on an adapter; a parametrised bias is evaluated once."""
    x = torch.randn(T, M, dtype=torch.float64)
    layer = fill(build("biased"))
    layer.experts.parametrizations.w1[0].register_forward_hook(lambda _, __, w: w * 2)
    with torch.no_grad():
        found, wanted = layer(x), fill(build("biased"))
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


def test_bfloat16_under_autocast() -> None:
    layer, x = fill(build()).float(), torch.randn(T, M)
    with torch.autocast("cpu", torch.bfloat16):
        got = numbers(layer, x)
        with summed():
            wanted = numbers(layer, x)
    for value, right in zip(got, wanted, strict=True):
        assert value.dtype == right.dtype
        torch.testing.assert_close(value, right, rtol=0, atol=0.05 * float(right.abs().max()))


def test_refusals() -> None:
    layer = build()
    for given in ({"experts": SwiGLU(H)}, {"experts": Custom(torch.nn.Linear)}, {"rank": 0}, {"names": ["b1"]}, {}):
        with pytest.raises(ConfigError, match="adapters|parametrised already"):
            add_adapters(**{"experts": layer.experts, "rank": 2, **given})


def pieces(whole: Tensor, axes: dict[str, int], topology: Topology) -> Tensor:
    for axis, dim in axes.items():
        group = getattr(topology, axis)
        whole = whole.chunk(group.size, dim)[group.index]
    return whole


def over_ranks(rank: int, world: int, kind: str, sizes: dict[str, int], tokens: list[Tensor], scheduled: bool) -> None:
    """Outputs and gradients of each rank's tokens and factors, beside those of one process."""
    schedule = {"schedule": Schedule("pipemoe", degrees=(2, 3))} if scheduled else {}
    with Topology.from_sizes(**sizes) as topology:
        layer, alone = build(kind, topology, **schedule), build(kind)
        shardings = parameter_shardings(layer)
        for (name, own), (_, whole) in zip(layer.named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(own.detach(), pieces(whole, shardings.get(name, {}), topology).detach())
        fill(alone)
        with torch.no_grad():
            for (name, own), whole in zip(layer.named_parameters(), alone.parameters(), strict=True):
                own.copy_(pieces(whole, shardings.get(name, {}), topology))
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
                right = pieces(whole.grad, shardings.get(name, {}), topology)
                torch.testing.assert_close(own.grad, right, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("sizes", "scheduled"), [({"ep": 2}, True), ({"esp": 2}, False), *slowly(({"ep": 2}, False), ({"esp": 2}, True))]
)
def test_two_ranks(cluster: Cluster, sizes: dict[str, int], scheduled: bool) -> None:
    """Split experts, and experts whose shards share a factor; by operators, and in chunks by a plan."""
    tokens = [torch.randn(count, M, dtype=torch.float64) for count in (5, 9)]
    cluster.run(2, over_ranks, "swiglu" if scheduled else "biased", sizes, tokens, scheduled)


@pytest.mark.slow
def test_four_ranks(cluster: Cluster) -> None:
    tokens = [torch.randn(count, M, dtype=torch.float64) for count in (5, 0, 9, 1)]
    cluster.run(4, over_ranks, "biased", {"ep": 2, "esp": 2}, tokens, False)


def steps_that_move(rank: int, world: int, placement: Any) -> tuple[list[float], int]:
    """Losses of some steps, and the bytes of experts that this rank has sent."""
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
    return losses, layer.placed.sent_bytes


def test_experts_that_move(cluster: Cluster) -> None:
    still, moving = (cluster.run(2, steps_that_move, placement) for placement in ("ep", "fssdp"))
    for (right, _), (losses, sent) in zip(still, moving, strict=True):
        assert losses == pytest.approx(right, rel=1e-10, abs=1e-10) and sent
