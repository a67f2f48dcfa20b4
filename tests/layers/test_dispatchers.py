"""Dispatchers alone, and a user-defined dispatcher in a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, autograd, experts, gates, orders
from fusedmoe.autograd.order import permute, unpermute
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
    """One-rank dispatcher that passes sorted rows to the experts and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def dispatch(self, routed: fusedmoe.Routed) -> tuple[Tensor, fusedmoe.Handle]:
        self.calls.append("dispatch")
        layout = routed.layout.exact()
        weight_N = autograd.row_weights(routed.weight_SK, layout)
        rows_NM = permute(routed.x_SM, layout)
        return rows_NM, fusedmoe.Handle(contiguous_layout(layout.counts_E, len(rows_NM)), weight_N, state=layout)

    def combine(self, out_RM: Tensor, handle: fusedmoe.Handle) -> Tensor:
        self.calls.append("combine")
        return unpermute(out_RM, handle.state)


def run_layer(dispatch: Any, topology: Topology, network: experts.Experts, **options: Any) -> Results:
    torch.manual_seed(3)
    gate = gates.TopK(E, K, aux={"balance": 1.0})
    layer = MoELayer(M, gate, network, topology=topology, dispatch=dispatch, dtype=torch.float64, **options)
    return run_passes(layer, torch.randn(9 + topology.rank, M, dtype=torch.float64))


@pytest.mark.parametrize("order", [orders.Sparse, orders.Dropless, orders.Einsum])
def test_custom_dispatcher_equals_builtin(order: type[orders.Order]) -> None:
    own = Own()
    right, found = (run_layer(dispatch, Topology(), experts.SwiGLU(5), order=order()) for dispatch in ("direct", own))
    assert own.calls == ["dispatch", "combine"]
    assert_same_results(found, right, 1e-12)


@pytest.mark.parametrize("own", [Own, lambda: Collectives(Topology(), make_all_to_all("direct", Topology()))])
@pytest.mark.parametrize("asks", [{"schedule": "fsmoe"}, {"schedule": "auto"}, {"placement": "fssdp"}], ids=str)
def test_custom_dispatcher_rejects_schedule_and_placement(own: Any, asks: dict[str, str]) -> None:
    (name,) = asks
    with pytest.raises(ConfigError, match=f"{name}='.*' has no effect with a dispatcher of your own, (Own|Coll)"):
        MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=own(), **asks)


def test_custom_dispatcher_rejects_set_plan() -> None:
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=Own())
    layer.set_plan(None)
    with pytest.raises(ConfigError, match="set_plan has no effect with a dispatcher of your own, Own"):
        layer.set_plan(Schedule("fsmoe", degrees=(2, 2)).plans(PIPELINE, None))


def test_custom_dispatcher_is_rejected_by_pipeline() -> None:
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=Own())
    with pytest.raises(ConfigError, match="dispatcher of your own"):
        fusedmoe.pipeline([(torch.nn.Identity(), layer)])
    with pytest.raises(ConfigError, match="choose one of direct, 1dh, 2dh"):
        MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch="own")


def check_chosen_algorithm(rank: int, world: int, seconds: dict[str, list[list[float]]], expected: str) -> None:
    topology = Topology.from_sizes(world, ranks_per_node=2, timeout_s=20)
    right = run_layer("direct", topology, experts.SwiGLU(5))

    def measured(through: Collectives, routed: Routed) -> list[float]:
        handle = through.dispatch(routed)  # a real dispatch; only the times are made up
        through.combine(*handle)
        return seconds[through.all_to_all.identity.split()[0]][rank]

    with pytest.MonkeyPatch.context() as patch:
        if seconds:
            patch.setattr(measure, "_round_trips_s", measured)
        found = run_layer("auto", topology, experts.SwiGLU(5))
    assert_same_results(found, right, 1e-12)
    if seconds:
        like = torch.empty(9 + rank, M, dtype=torch.float64)
        found_again = measure.choose_all_to_all(topology, gates.TopK(E, K), like)
        assert found_again.identity.startswith(expected)


SECONDS = {
    # Each round counts its slowest rank, and the median over rounds is used: neither a rank's own time nor the best or
    # worst round.
    "direct": [[1.0, 5.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
    "1dh": [[6.0, 6.0, 0.0], [0.0] * 3, [6.0, 0.0, 6.0], [0.0] * 3],
    "2dh": [[4.0, 4.0, 99.0], [0.0] * 3, [4.0] * 3, [3.0] * 3],
}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(SECONDS, "2dh"), pytest.param({}, "", marks=pytest.mark.slow)],
    ids=["synthetic times", "measured times"],
)
def test_auto_dispatch_chooses_fastest_algorithm(
    cluster: Cluster, seconds: dict[str, list[list[float]]], expected: str
) -> None:
    cluster.run(4, check_chosen_algorithm, seconds, expected)


@pytest.mark.parametrize(("world", "per_node"), [(4, 4), (4, 1)])
def test_auto_dispatch_skips_choice_of_equal_algorithms(cluster: Cluster, world: int, per_node: int) -> None:
    cluster.run(world, check_no_choice, per_node)


def check_no_choice(rank: int, world: int, per_node: int) -> None:
    topology = Topology.from_sizes(world, ranks_per_node=per_node, timeout_s=20)
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), topology=topology, dispatch="auto")
    assert isinstance(layer.dispatcher, Collectives) and layer.dispatcher.choose_algorithm is None


class Incomplete(fusedmoe.Dispatcher):
    pass


class DispatchOnly(Own):
    combine = Dispatcher.combine


class Whole(fusedmoe.Dispatcher):
    """`through_experts` alone is enough for a layer."""

    def through_experts(self, routed: fusedmoe.Routed, local_experts: Any) -> Tensor:
        return local_experts(routed.x_SM, routed.layout, autograd.row_weights(routed.weight_SK, routed.layout))


@pytest.mark.parametrize(
    ("dispatcher", "message"),
    [
        (Incomplete, r"Incomplete does not implement dispatch and combine\. .* dispatch\(routed\)"),
        (DispatchOnly, r"DispatchOnly does not implement combine\."),
    ],
)
def test_dispatcher_without_methods_raises(dispatcher: type[Dispatcher], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoELayer(M, gates.TopK(E, K), experts.SwiGLU(5), dispatch=dispatcher())


def test_dispatcher_may_define_through_experts_only() -> None:
    right, found = (run_layer(dispatch, Topology(), experts.SwiGLU(5)) for dispatch in ("direct", Whole()))
    assert_same_results(found, right, 1e-12)


def test_row_weights_of_no_weights_is_none() -> None:
    layout = autograd.order(torch.tensor([[1, 0], [0, -1]]), 2)
    assert autograd.row_weights(None, layout) is None
    weight_N = autograd.row_weights(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), layout)
    assert weight_N is not None and weight_N.tolist() == [3.0, 2.0, 1.0]


class Apart(Collectives):
    """Dispatch, experts and combine without overlap."""

    through_experts = Dispatcher.through_experts


def compare_separate_dispatch_and_combine(rank: int, world: int, ep: int, esp: int) -> None:
    """`dispatch` and `combine` return the same bits as the plan with one chunk."""
    topology = Topology.from_sizes(ep, esp)
    plain = run_layer("direct", topology, experts.SwiGLU(4))
    parts = run_layer(Apart(topology, make_all_to_all("direct", topology)), topology, experts.SwiGLU(4))
    assert_same_results(parts, plain)


@pytest.mark.parametrize(("ep", "esp"), [(2, 1), (1, 2)])
def test_separate_dispatch_and_combine_equal_plan_bitwise(cluster: Cluster, ep: int, esp: int) -> None:
    cluster.run(2, compare_separate_dispatch_and_combine, ep, esp)


def check_second_derivative(rank: int, world: int) -> None:
    """Row moves are linear at any order of differentiation: twice-differentiable experts stay twice differentiable."""
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


def test_second_derivative_through_dispatcher(cluster: Cluster) -> None:
    cluster.run(2, check_second_derivative)


def test_local_dispatcher_returns_rows_unchanged() -> None:
    x, layout = torch.randn(3, M), autograd.order(torch.tensor([[0], [2], [1]]), E)
    rows, handle = Local().dispatch(Routed(x, layout))
    assert rows is x and handle == Handle(layout, None) and Local().combine(rows, handle) is rows


def backward_with_gradients_on_one_rank(rank: int, world: int) -> None:
    """Only rank 0's tokens have a gradient, and the gate is frozen: all ranks still run backward together."""
    topology = Topology.from_sizes(world, timeout_s=20)
    torch.manual_seed(0)
    layer = MoELayer(M, gates.TopK(E, K), experts.SwiGLU(4), topology=topology, dtype=torch.float64)
    layer.gate.requires_grad_(False)
    for tokens in ((5, 3), (5, 0)):
        x = torch.randn(tokens[rank], M, dtype=torch.float64, requires_grad=rank == 0)
        layer(x).sum().backward()
        assert (x.grad is not None) == (rank == 0)
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


def test_backward_when_one_rank_needs_gradients(cluster: Cluster) -> None:
    cluster.run(2, backward_with_gradients_on_one_rank)


def test_subclass_does_not_inherit_compiles() -> None:
    assert Collectives.compiles and not Apart.compiles
