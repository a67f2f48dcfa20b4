"""Dispatchers by themselves, and one of the user's own in a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, autograd, experts, gates, orders
from fusedmoe.autograd.order import permute, take_pairs, unpermute
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher, Handle, Local, Routed
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers import measure
from fusedmoe.schedule.task import PIPELINE
from tests.cluster import Cluster
from tests.oracle import Results, assert_same_results, run_passes

M, E, K = 6, 4, 2


class Own(fusedmoe.Dispatcher):
    """One rank's, which gives experts their rows sorted, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def dispatch(self, routed: fusedmoe.Routed) -> tuple[Tensor, fusedmoe.Handle]:
        self.calls.append("dispatch")
        x_SM, layout, weight_SK, _ = routed
        layout = layout.exact()
        weight_N = None if weight_SK is None else take_pairs(weight_SK, layout)
        rows_NM = permute(x_SM, layout)
        return rows_NM, fusedmoe.Handle(contiguous_layout(layout.counts_E, len(rows_NM)), weight_N, state=layout)

    def combine(self, out_RM: Tensor, handle: fusedmoe.Handle) -> Tensor:
        self.calls.append("combine")
        return unpermute(out_RM, handle.state)


def step(dispatch: Any, topology: Topology, network: experts.Experts, **options: Any) -> Results:
    torch.manual_seed(3)
    gate = gates.TopK(E, K, aux={"balance": 1.0})
    layer = MoELayer(M, gate, network, topology=topology, dispatch=dispatch, dtype=torch.float64, **options)
    return run_passes(layer, torch.randn(9 + topology.rank, M, dtype=torch.float64))


@pytest.mark.parametrize("order", [orders.Sparse, orders.Dropless, orders.Einsum])
def test_one_of_your_own(order: type[orders.Order]) -> None:
    own = Own()
    right, found = (step(dispatch, Topology(), experts.SwiGLU(5), order=order()) for dispatch in ("direct", own))
    assert own.calls == ["dispatch", "combine"]
    assert_same_results(found, right, 1e-12)


@pytest.mark.parametrize("own", [Own, lambda: Collectives(Topology(), make_all_to_all("direct", Topology()))])
@pytest.mark.parametrize("asks", [{"schedule": "fsmoe"}, {"schedule": "auto"}, {"placement": "fssdp"}], ids=str)
def test_what_one_of_your_own_would_ignore(own: Any, asks: dict[str, str]) -> None:
    (name,) = asks
    with pytest.raises(ConfigError, match=f"{name}='.*' has no effect with a dispatcher of your own, (Own|Coll)"):
        MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=own(), **asks)


def test_plans_of_one_of_your_own() -> None:
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=Own())
    layer.set_plan(None)
    with pytest.raises(ConfigError, match="set_plan has no effect with a dispatcher of your own, Own"):
        layer.set_plan(Schedule("fsmoe", degrees=(2, 2)).plans(PIPELINE, None))


def test_what_does_not_go_with_one_of_your_own() -> None:
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=Own())
    with pytest.raises(ConfigError, match="dispatcher of your own"):
        fusedmoe.pipeline([(torch.nn.Identity(), layer)])
    with pytest.raises(ConfigError, match="choose one of direct, 1dh, 2dh"):
        MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch="own")


def chosen(rank: int, world: int, seconds: dict[str, list[list[float]]], expected: str) -> None:
    topology = Topology.from_sizes(world, ranks_per_node=2, timeout_s=20)
    right = step("direct", topology, experts.SwiGLU(5))

    def measured(topology: Topology, through: Collectives, routed: Routed) -> list[float]:
        handle = through.dispatch(routed)  # as it is, and other than what was measured
        through.combine(*handle)
        return seconds[through.all_to_all.identity.split()[0]][rank]

    with pytest.MonkeyPatch.context() as patch:
        if seconds:
            patch.setattr(measure, "_round_trips_s", measured)
        found = step("auto", topology, experts.SwiGLU(5))
    assert_same_results(found, right, 1e-12)
    if seconds:
        like = torch.empty(9 + rank, M, dtype=torch.float64)
        found_again = measure.choose_all_to_all(topology, gates.TopK(E, K), like)
        assert found_again.identity.startswith(expected)


SECONDS = {
    # By round: the median of the slowest rank counts, not a rank's own, nor the best or worst round.
    "direct": [[1.0, 5.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
    "1dh": [[6.0, 6.0, 0.0], [0.0] * 3, [6.0, 0.0, 6.0], [0.0] * 3],
    "2dh": [[4.0, 4.0, 99.0], [0.0] * 3, [4.0] * 3, [3.0] * 3],
}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(SECONDS, "2dh"), pytest.param({}, "", marks=pytest.mark.slow)],
    ids=["made times", "measured"],
)
def test_the_shortest_is_chosen(cluster: Cluster, seconds: dict[str, list[list[float]]], expected: str) -> None:
    cluster.run(4, chosen, seconds, expected)


@pytest.mark.parametrize(("world", "per_node"), [(4, 4), (4, 1)])
def test_no_choice_where_algorithms_are_the_same(cluster: Cluster, world: int, per_node: int) -> None:
    cluster.run(world, nothing_to_choose, per_node)


def nothing_to_choose(rank: int, world: int, per_node: int) -> None:
    topology = Topology.from_sizes(world, ranks_per_node=per_node, timeout_s=20)
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), topology=topology, dispatch="auto")
    assert isinstance(layer.dispatcher, Collectives) and layer.dispatcher.choose is None


class Apart(Collectives):
    """Dispatch, experts and combine one after the other."""

    through_experts = Dispatcher.through_experts


def apart(rank: int, world: int, ep: int, esp: int) -> None:
    """By `dispatch` and `combine` the same bits come out as by the plan of one chunk."""
    topology = Topology.from_sizes(ep, esp)
    plain = step("direct", topology, experts.SwiGLU(4))
    parts = step(Apart(topology, make_all_to_all("direct", topology)), topology, experts.SwiGLU(4))
    assert_same_results(parts, plain)


@pytest.mark.parametrize(("ep", "esp"), [(2, 1), (1, 2)])
def test_by_parts(cluster: Cluster, ep: int, esp: int) -> None:
    cluster.run(2, apart, ep, esp)


def twice(rank: int, world: int) -> None:
    """Moves are linear, as often as autograd asks: experts that can be differentiated twice are."""
    topology = Topology.from_sizes(world)
    dispatcher = Collectives(topology, make_all_to_all("direct", topology))
    torch.manual_seed(rank)
    x = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    layout = autograd.order(torch.tensor([[0, 1], [1, 0], [1, 1]]), 2)

    def through(x: Tensor) -> Tensor:
        rows, handle = dispatcher.dispatch(Routed(x, layout))
        return dispatcher.combine(unpermute(permute(rows, handle.layout) ** 3, handle.layout), handle)

    (first,) = torch.autograd.grad(through(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 6 * x**2)
    torch.testing.assert_close(second, 12 * x)


def test_twice(cluster: Cluster) -> None:
    cluster.run(2, twice)


def test_local() -> None:
    x, layout = torch.randn(3, M), autograd.order(torch.tensor([[0], [2], [1]]), E)
    rows, handle = Local().dispatch(Routed(x, layout))
    assert rows is x and handle == Handle(layout, None) and Local().combine(rows, handle) is rows


def one_has_gradients(rank: int, world: int) -> None:
    """Tokens of rank 0 alone have a gradient, and the gate learns nothing: all ranks still go back together."""
    topology = Topology.from_sizes(world, timeout_s=20)
    torch.manual_seed(0)
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(4), topology=topology, dtype=torch.float64)
    layer.gate.requires_grad_(False)
    for tokens in ((5, 3), (5, 0)):
        x = torch.randn(tokens[rank], M, dtype=torch.float64, requires_grad=rank == 0)
        layer(x).sum().backward()
        assert (x.grad is not None) == (rank == 0)
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


def test_tokens_of_one_rank_have_gradients(cluster: Cluster) -> None:
    cluster.run(2, one_has_gradients)


def test_a_subclass_says_again_that_graphs_can_hold_it() -> None:
    assert Collectives.compiles and not Apart.compiles
