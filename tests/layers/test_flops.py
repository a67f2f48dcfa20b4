"""PyTorch's FLOP counter includes the products of experts and router, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe
from fusedmoe import Schedule, Topology, autograd
from fusedmoe.autograd.grouped import grouped_linear
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.scheduled_operator import through_experts_in_graph
from fusedmoe.experts import Custom, Experts, FeedForward, SwiGLU, add_adapters
from tests.cluster import Cluster

D, E, K, H, S = 16, 4, 2, 32, 24
ROUTER = 2 * S * D * E
PRODUCT = 2 * S * K * D * H  # all rows with one matrix each


def _counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _layer(experts: Experts, **options: Any) -> fusedmoe.MoELayer:
    torch.manual_seed(0)
    return fusedmoe.MoELayer(D, fusedmoe.gates.TopK(E, K), experts, **options)


def _own(model_dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(model_dim, H), nn.ReLU(), nn.Linear(H, model_dim))


@pytest.mark.parametrize(
    ("make", "products"),
    [
        (lambda: SwiGLU(H), 3),
        (lambda: FeedForward(H, bias=False), 2),
        (lambda: FeedForward(H, bias=True), 2),
        (lambda: Custom(_own), 2),
    ],
)
def test_flops_of_layer_equal_formula(make: Callable[[], Experts], products: int) -> None:
    layer, x = _layer(make()), torch.randn(S, D, requires_grad=True)
    forward = ROUTER + products * PRODUCT
    assert _counted(lambda: layer(x)) == forward
    with torch.no_grad():
        assert _counted(lambda: layer(x.detach())) == forward
    assert _counted(lambda: layer(x).sum().backward()) == 3 * forward
    # Recomputed products count again.
    assert _counted(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward()) == 4 * forward
    # Without parameter gradients, only the rows' gradients are computed.
    layer.experts.requires_grad_(False)
    assert _counted(lambda: layer(x).sum().backward()) == 3 * ROUTER + 2 * products * PRODUCT


def test_flops_of_low_rank_adapters_equal_formula() -> None:
    rank, layer = 2, _layer(SwiGLU(H))
    add_adapters(layer.experts, rank=rank)
    x = torch.randn(S, D, requires_grad=True)
    up, down = rank * (D + 2 * H), rank * (H + D)
    factors = 2 * S * K * (up + down)
    forward = ROUTER + 3 * PRODUCT + factors
    assert _counted(lambda: layer(x)) == forward
    assert _counted(lambda: layer(x).sum().backward()) == 3 * ROUTER + 2 * 3 * PRODUCT + 3 * factors


def test_flops_of_grouped_linear_equal_formula() -> None:
    x, weight = torch.randn(S, D, requires_grad=True), torch.randn(E, H, D, requires_grad=True)
    layout = autograd.order(torch.randint(0, E, (S, K)), E)
    rows = autograd.permute(x, layout)
    once = 2 * layout.rows * D * H
    assert _counted(lambda: grouped_linear(rows, layout, weight)) == once
    assert _counted(lambda: grouped_linear(rows, layout, weight).sum().backward(retain_graph=True)) == 3 * once
    assert _counted(lambda: grouped_linear(rows.detach(), layout, weight).sum().backward()) == 2 * once


def _on_all_ranks(topology: Topology, count: int) -> int:
    return int(all_reduce(topology.world, torch.tensor(count)))


def _over_ranks(rank: int, world: int, schedule: Any) -> None:
    """The sum over ranks equals one process's count, whichever rank computes which expert."""
    topology = Topology.from_sizes(ep=world)
    layer = _layer(SwiGLU(H), topology=topology, mp_input="split", schedule=schedule)
    x = torch.randn(S - rank, D, requires_grad=True)
    tokens = sum(S - each for each in range(world))
    products = tokens * 3 * PRODUCT // S
    forward = tokens * ROUTER // S + products

    def backward(y: Tensor) -> None:
        y.sum().backward()

    backward(layer(x))
    assert _on_all_ranks(topology, _counted(lambda: backward(layer(x)))) == 3 * forward
    with torch.no_grad():
        assert _on_all_ranks(topology, _counted(lambda: layer(x.detach()))) == forward
    # As in a compiler's graph: one operator.
    weight_SK = torch.rand(len(x), K, requires_grad=True)
    routed = Routed(x, autograd.order(torch.randint(0, E, (len(x), K)), E), weight_SK)
    assert isinstance(layer.dispatcher, Collectives)

    def by_operator() -> Tensor:
        return through_experts_in_graph(layer.dispatcher, routed, layer.experts)[0]  # type: ignore[arg-type]

    assert _on_all_ranks(topology, _counted(lambda: backward(by_operator()))) == 3 * products
    with torch.no_grad():
        assert _on_all_ranks(topology, _counted(by_operator)) == products


@pytest.mark.parametrize("degrees", [None, (2, 2), (3, 1)])
def test_flops_summed_over_ranks_equal_one_process(cluster: Cluster, degrees: tuple[int, int] | None) -> None:
    cluster.run(2, _over_ranks, "off" if degrees is None else Schedule("fsmoe", degrees=degrees))


IMPORTED_LATER = """
import torch, fusedmoe.tutel.moe
ffn = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 6}
layer = fusedmoe.tutel.moe.moe_layer(gate_type={"type": "top", "k": 2}, model_dim=4, experts=ffn)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    layer(torch.randn(5, 4))
assert counter.get_total_flops() > 2 * 5 * 4 * 2, "the router alone"
"""


def test_flop_counter_imported_after_first_layer() -> None:
    assert subprocess.run([sys.executable, "-c", IMPORTED_LATER], timeout=120).returncode == 0
