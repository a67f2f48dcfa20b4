"""Results do not depend on the schedule: outputs, auxiliary loss, drops and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.experts import SwiGLU
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import Schedule
from fusedmoe.schedule.cost import CostModel, Line
from tests.cluster import Cluster, RankFailed
from tests.layers.test_parallel import EXPERTS, GATES, ORDERS, M

TOKENS = [23, 0, 41, 1]
DEGREES = (1, 2, 4, 8)
PAIRS = list(itertools.product(DEGREES, DEGREES))


def build(gate: str, order: str, experts: str, topology: Topology, dtype: torch.dtype, **options: Any) -> MoELayer:
    torch.manual_seed(7)
    layer = MoELayer(
        M, GATES[gate](), EXPERTS[experts](), order=ORDERS[order](), topology=topology, dtype=dtype, **options
    )
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def step(layer: MoELayer, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(100 + rank)
    x = torch.randn(TOKENS[rank], M, dtype=dtype).requires_grad_()
    y = layer(x)
    loss = (y * torch.randn(y.shape, dtype=dtype)).sum() + 0.3 * layer.aux_loss
    loss.backward()
    found = {"y": y.detach(), "dx": x.grad, "dropped": torch.tensor(layer.dropped), "load": layer.load_E}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


def compare(
    rank: int,
    world: int,
    ep: int,
    esp: int,
    gate: str,
    order: str,
    experts: str,
    dispatch: str,
    policy: str,
    pairs: list[tuple[int, int]],
) -> int:
    """How many of the results are the same bits as without a schedule, of those that may differ in the last ones."""
    topology = Topology.from_sizes(ep, esp, ranks_per_node=2)
    same = 0
    options: dict[str, Any] = {"dispatch": dispatch}
    plain = step(build(gate, order, experts, topology, torch.float64, **options), rank, torch.float64)
    for pair in pairs:
        layer = build(gate, order, experts, topology, torch.float64, schedule=Schedule(policy, pair), **options)
        found = step(layer, rank, torch.float64)
        assert found.keys() == plain.keys()
        for name, right in plain.items():
            got = found[name]
            if right is None:
                assert got is None, name
                continue
            if pair == (1, 1) or not right.is_floating_point():
                assert torch.equal(got, right), (pair, name)
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)
            same += torch.equal(got, right)
    return same


@pytest.mark.parametrize("experts", ["swiglu", "feed_forward"])
@pytest.mark.parametrize(("world", "ep", "esp"), [(2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2)])
def test_degrees(cluster: Cluster, world: int, ep: int, esp: int, experts: str) -> None:
    cluster.run(world, compare, ep, esp, "topk", "sparse", experts, "direct", "fsmoe", PAIRS)


@pytest.mark.parametrize("gate", [name for name in GATES if name not in ("topk", "switch")])
def test_gates(cluster: Cluster, gate: str) -> None:
    order = "dropless" if gate in ("topk3", "deepseek_v3") else "sparse"
    cluster.run(4, compare, 2, 2, gate, order, "swiglu", "direct", "fsmoe", [(4, 2), (2, 8)])


@pytest.mark.parametrize("policy", ["sequential", "tutel", "lina", "fsmoe_no_iio", "joint"])
def test_policies(cluster: Cluster, policy: str) -> None:
    cluster.run(4, compare, 2, 2, "topk", "dropless", "swiglu", "direct", policy, [(4, 2), (3, 3)])


@pytest.mark.parametrize("dispatch", ["1dh", "2dh"])
def test_dispatch(cluster: Cluster, dispatch: str) -> None:
    cluster.run(4, compare, 4, 1, "topk", "sparse", "feed_forward", dispatch, "fsmoe", [(1, 1), (4, 2)])


def test_modules_and_products(cluster: Cluster) -> None:
    cluster.run(4, compare, 2, 2, "topk", "sparse", "custom", "direct", "fsmoe", [(1, 1), (4, 4)])
    cluster.run(4, compare, 2, 2, "topk", "einsum", "swiglu", "direct", "fsmoe", [(1, 1), (4, 2)])


class Count(fusedmoe.Hooks):
    """Notes which chunks its seams saw, and sends bfloat16."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int]] = []

    def before_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        self.seen.append(("dispatch", context.direction, context.chunk, context.chunks))
        return rows.to(torch.bfloat16)

    def after_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        return rows.double()

    def before_combine(self, rows: Tensor, context: fusedmoe.HookContext) -> Tensor:
        self.seen.append(("combine", context.direction, context.chunk, context.chunks))
        return rows.to(torch.bfloat16)

    after_combine = after_dispatch


def hooked(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    hooks = [Count(), Count()]
    plain, chunked = (
        step(build("topk", "sparse", "swiglu", topology, torch.float64, hooks=[hook], **options), rank, torch.float64)
        for hook, options in zip(hooks, ({}, {"schedule": Schedule("fsmoe", (3, 2))}), strict=True)
    )
    for name, right in plain.items():
        torch.testing.assert_close(chunked[name], right, rtol=1e-10, atol=1e-10)
    chunks = [("forward", i, 3) for i in range(3)] + [("backward", i, 2) for i in range(2)]
    expected = {(what, *chunk) for what in ("dispatch", "combine") for chunk in chunks}
    assert set(hooks[1].seen) == expected and len(hooks[1].seen) == len(expected)
    assert len(hooks[0].seen) == 4


def test_hooks_see_every_chunk(cluster: Cluster) -> None:
    cluster.run(2, hooked)


def by_costs(rank: int, world: int) -> tuple[Any, Any]:
    """Slow links make many chunks worth their start; a link that takes long to start makes one best."""
    topology = Topology.from_sizes(2)
    found = []
    for alpha_s in (0.0, 10.0):
        line = Line(alpha_s, 1e-9)
        costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-12), "all-reduce/dp": line})
        layer = build("topk", "sparse", "swiglu", topology, torch.float64, schedule=Schedule("fsmoe", costs=costs))
        step(layer, rank, torch.float64)
        (plans,) = layer._plans.values()
        found.append((max(plans.forward.degrees.values()), max(plans.backward.degrees.values())))
        found.append(plans.forward.fingerprint)
    return tuple(found)


def test_degrees_by_costs(cluster: Cluster) -> None:
    one, other = cluster.run(2, by_costs)
    assert one == other
    assert min(one[0]) > 1 and one[2] == (1, 1)


def fail_in_a_chunk(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2, timeout_s=60.0)
    layer = build("topk", "sparse", "swiglu", topology, torch.float64, schedule=Schedule("fsmoe", (4, 4)))
    if rank == 1:
        usual = layer.experts.in_chunks

        def broken(x: Tensor) -> Any:
            chunks, calls, forward = usual(x), [0], usual(x).forward

            def third(*arguments: Any) -> Any:
                calls[0] += 1
                if calls[0] == 3:
                    raise MemoryError("no room for chunk 2")
                return forward(*arguments)

            chunks.forward = third  # type: ignore[method-assign]
            return chunks

        layer.experts.in_chunks = broken  # type: ignore[method-assign]
    step(layer, rank, torch.float64)


def test_a_failure_in_a_chunk_names_its_rank(cluster: Cluster) -> None:
    with pytest.raises(RankFailed) as failed:
        cluster.run(2, fail_in_a_chunk, timeout_s=40.0)
    names = {rank: (name, message) for rank, (name, message, _) in failed.value.errors.items()}
    assert names[1] == ("MemoryError", "no room for chunk 2")
    assert names[0][0] == "RankError" and "rank 1 failed" in names[0][1] and "no room for chunk 2" in names[0][1]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="unknown schedule 'fast'; choose off, sequential"):
        Schedule("fast", (1, 1))
    with pytest.raises(ConfigError, match="each at least 1"):
        Schedule("fsmoe", (0, 1))
    with pytest.raises(ConfigError, match="give costs"):
        Schedule("fsmoe")


def test_one_process_does_not_notice() -> None:
    layers = []
    for schedule in ("off", Schedule("fsmoe", (4, 2))):
        torch.manual_seed(0)
        layers.append(MoELayer(M, GATES["topk"](), SwiGLU(8), schedule=schedule))  # type: ignore[arg-type]
    x = torch.randn(30, M)
    assert torch.equal(layers[0](x), layers[1](x))
