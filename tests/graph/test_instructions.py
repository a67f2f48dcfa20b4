"""Dependency sets compared with a path search; weight gradients and pass orders."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed._functional_collectives import all_reduce, all_to_all_single
from torch.fx.experimental.proxy_tensor import make_fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.instructions import (
    Instructions,
    decouple_random_draws,
    fuse_shifts,
    is_all_to_all,
    is_collective,
    is_compute,
    is_wait,
    schema_of,
    set_bits,
)
from fusedmoe.graph.weight_gradients import assign_units, base_order_of, exposed_gaps, full_order, reorder, units_of
from fusedmoe.schedule.policies.lancet_plans import Gap

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("world")


def test_schema_of_any_operator_is_available() -> None:
    """Argument names that Python signatures cannot hold together, and types that Python lacks."""
    with torch.library._scoped_library("instructions", "DEF") as library:
        library.define("scale(Tensor self, Tensor input) -> Tensor")
        assert [argument.name for argument in schema_of(torch.ops.instructions.scale.default).arguments] == [
            "self",
            "input",
        ]
    assert schema_of(aten.conv_tbc.default).name == "aten::conv_tbc"
    assert schema_of(len) is None


def random_graph(rng: random.Random) -> fx.Graph:
    """Draw products, sums, random numbers and all-to-alls of earlier nodes."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(2)]
    waits: list[fx.Node] = []
    for _ in range(rng.randint(5, 25)):
        kind = rng.random()
        if kind < 0.25:
            waits.append(
                graph.call_function(
                    torch.ops._c10d_functional.all_to_all_single.default, (rng.choice(nodes), [4], [4], "0")
                )
            )
            continue
        if kind < 0.45 and waits:
            start = waits.pop(rng.randrange(len(waits)))
            nodes.append(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,)))
        elif kind < 0.55:
            nodes.append(graph.call_function(aten.bernoulli.p, (rng.choice(nodes), 0.5)))
        else:
            pair = (rng.choice(nodes), rng.choice(nodes))
            nodes.append(graph.call_function(rng.choice([aten.mm.default, aten.add.Tensor]), pair))
    for start in waits:
        nodes.append(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,)))
    graph.output(tuple(rng.sample(nodes, rng.randint(1, min(4, len(nodes))))))
    return graph


def test_noise_by_shape_equals_noise_like_tensor() -> None:
    """Noise drawn by shape equals noise drawn like the tensor.

    This covers all dtypes; noise for a transposed layout still depends on the tensor.
    """

    def noisy(x: Tensor) -> list[Tensor]:
        drawn = [torch.rand_like(x), torch.randn_like(x), torch.randn_like(x, dtype=torch.bfloat16)]
        return [*drawn, torch.empty_like(x).uniform_(-1, 2), x.new_empty(3, 2).normal_()]

    for x, waits in ((torch.randn(4, 6), False), (torch.randn(4, 6).double().t(), True), (torch.randn(0, 6), False)):
        module = make_fx(noisy, tracing_mode="fake")(x)
        decouple_random_draws(module.graph)
        module.recompile()
        (given,) = (node for node in module.graph.nodes if node.op == "placeholder")
        assert bool(given.users) == waits
        seed = torch.seed()
        right = noisy(x)
        torch.manual_seed(seed)
        for ours, theirs in zip(module(x), right, strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


def test_shift_by_one_row_becomes_one_operator() -> None:
    def moved(x: Tensor) -> list[Tensor]:
        ones = [torch.cat([x.new_zeros(1, 6), x[:-1]]), torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], -1)]
        others = [torch.cat([x.new_ones(1, 6), x[:-1]]), torch.cat([x.new_zeros(1, 6), x[1:]])]
        return [*ones, *others, torch.cat([x.new_zeros(2, 6), x[:-2]]), torch.cat([x[:-1], x.new_zeros(1, 6)])]

    for x in (torch.randn(4, 6), torch.randint(9, (4, 6)), torch.randn(1, 6)):
        module = make_fx(moved, tracing_mode="fake")(x)
        fuse_shifts(module.graph)
        module.recompile()
        assert [node.target for node in module.graph.nodes].count(aten.constant_pad_nd.default) == 2
        for ours, theirs in zip(module(x), moved(x), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


def has_path(one: fx.Node, other: fx.Node, draws: list[fx.Node]) -> bool:
    follow = {before: after for before, after in zip(draws, draws[1:], strict=False)}
    ends, seen = [one], set()
    while ends:
        node = ends.pop()
        if node is other:
            return True
        if node not in seen:
            seen.add(node)
            ends += [*node.users, *([follow[node]] if node in follow else [])]
    return False


def test_overlappable_instructions_equal_path_search() -> None:
    rng = random.Random()
    for _ in range(60):
        graph = random_graph(rng)
        of = Instructions(graph)
        draws = [node for node in of.nodes if node.target is aten.bernoulli.p]
        for start in of.starts:
            here = of.nodes[start]
            right = {
                node
                for node in of.nodes
                if is_compute(node) and not has_path(node, here, draws) and not has_path(here, node, draws)
            }
            assert set(of.nodes_of(of.overlappable(start))) == right


def test_orders_of_random_graphs_respect_dependencies() -> None:
    """Any placement runs every instruction once, after its dependencies.

    All-to-alls keep their order, and a unit overlapped with an all-to-all runs between its start and its first wait.
    """
    rng = random.Random()
    for _ in range(150):
        graph = random_graph(rng)
        of = Instructions(graph)
        gradients = {node for node in graph.output_node().all_input_nodes if rng.random() < 0.7}
        seconds = {node: rng.random() for node in of.nodes}
        base_order = base_order_of(of, gradients, seconds.__getitem__)
        starts, gaps = exposed_gaps(of, base_order, lambda node: 3.0)
        units_s = [sum(seconds[node] for node in of.nodes_of(unit)) for unit in base_order.units]
        placed = assign_units(gaps, units_s)
        beside: dict[int, list[int]] = {}
        for unit, number in enumerate(placed):
            if number is not None:
                beside.setdefault(starts[number], []).append(unit)
        order = full_order(of, base_order, beside)
        assert sorted(order) == list(range(len(of.nodes)))
        at = {index: position for position, index in enumerate(order)}
        assert [index for index in order if index in starts] == starts
        for start, units in beside.items():
            first = min(at[wait] for wait in set_bits(of.waits[start]))
            for unit in units:
                assert all(at[index] < first for index in set_bits(base_order.units[unit]))
        reorder(graph, of, order)
        # A placed unit has no path to or from its all-to-all.
        for start, units in beside.items():
            for unit in units:
                assert not any(of.ancestors[index] >> start & 1 for index in set_bits(base_order.units[unit]))
                assert not any(of.ancestors[start] >> index & 1 for index in set_bits(base_order.units[unit]))


def backward_by_hand(dy: Tensor, x0: Tensor, x1: Tensor, w0: Tensor, w1: Tensor) -> tuple[Tensor, ...]:
    """Backward pass of two linear layers with an all-to-all between them; weight gradients are averaged over ranks."""
    dw1 = all_reduce(dy.t() @ x1, "avg", dist.group.WORLD) * 1.0
    dx1 = all_to_all_single(dy @ w1, None, None, dist.group.WORLD) * 2
    dw0 = all_reduce(dx1.t() @ x0, "avg", dist.group.WORLD) * 1.0
    return dw1, dw0, dx1 @ w0


def capture(function: object, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[arg-type]


def test_weight_gradient_units_fill_all_to_all_gaps() -> None:
    inputs = [torch.randn(6, 6, dtype=torch.float64) for _ in range(5)]
    module = capture(backward_by_hand, *inputs)
    right = module(*inputs)
    of = Instructions(module.graph)
    gradients = set(module.graph.output_node().args[0][:2])  # type: ignore[index]
    units = [[node.name for node in of.nodes_of(unit)] for unit in units_of(of, gradients)]
    # A unit ends at the all-reduce; the second one depends on the all-to-all.
    assert units == [["t", "mm"], ["t_1", "mm_2"]]
    base_order = base_order_of(of, gradients, lambda node: 1.0)
    starts, gaps = exposed_gaps(of, base_order, lambda node: 5.0)
    assert gaps == [Gap(5.0, frozenset({0}))]
    order = full_order(of, base_order, {starts[0]: [0]})
    reorder(module.graph, of, order)
    module.recompile()
    names = [node.name for node in module.graph.nodes]
    assert names.index("all_to_all_single") < names.index("mm") < names.index("all_reduce")
    assert names.index("all_reduce") < names.index("wait_tensor_1")  # the wait of the all-to-all
    for ours, theirs in zip(module(*inputs), right, strict=True):
        assert torch.equal(ours, theirs)


def test_unassigned_units_overlap_last_possible_all_to_all() -> None:
    """An all-to-all that one unit fills: the remaining units still overlap with it (the last possible all-to-all)."""
    assert assign_units([Gap(1.0, {0, 1, 2})], [2.0, 2.0, 2.0]) == (0, 0, 0)
    assert assign_units([Gap(1.0, {0, 1}), Gap(0.5, {0, 1, 2}), Gap(0.0, set())], [2.0, 2.0, 2.0])[2] == 1
    assert assign_units([Gap(1.0, set())], [2.0]) == (None,)


def test_reorder_rejects_order_violating_dependencies() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.neg.default, (graph.call_function(aten.exp.default, (x,)),)),))
    with pytest.raises(ConfigError, match="neg_default precedes exp_default"):
        reorder(graph, Instructions(graph), [1, 0])


def test_in_place_operators_keep_their_position() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.exp.default, (x,))
    change = graph.call_function(aten.add_.Tensor, (x, 1))
    last = graph.call_function(aten.exp.default, (x,))
    graph.output((first, change, last))
    of = Instructions(graph)
    assert of.ancestors == [0, 0b1, 0b11]


def test_start_and_wait_kinds_are_disjoint() -> None:
    graph = random_graph(random.Random(1))
    for node in graph.nodes:
        assert not (is_collective(node) and is_wait(node))
        assert not is_all_to_all(node) or is_collective(node)
