"""A parallel layer equals the dense computation: outputs, auxiliary loss and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.autograd.parallel import split_counts
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.expert_networks import NAMED, Custom, Experts, FeedForward, SwiGLU
from fusedmoe.layers.gates import Gate
from fusedmoe.layers.moe import MoELayer, MpInput
from fusedmoe.layers.orders import Dropless, Einsum, Order, Sparse
from tests.cluster import Cluster
from tests.layers.dense import ShardedExpert, dense_forward
from tests.marks import slowly

E, M, H = 8, 6, 8
TOKENS = [5, 0, 11, 1]  # by rank; an empty rank and a rank with one token among them

GATES: dict[str, Callable[[], Gate]] = {
    "topk": lambda: fusedmoe.gates.TopK(experts=E, k=2, capacity_factor=0.8, aux={"balance": 0.5, "z": 0.1}),
    "topk3": lambda: fusedmoe.gates.TopK(experts=E, k=3),
    "switch": lambda: fusedmoe.gates.Switch(experts=E, capacity_factor=1.0),
    "gshard": lambda: fusedmoe.gates.GShard(experts=E, k=2, capacity_factor=1.25),
    "sigmoid": lambda: fusedmoe.gates.Sigmoid(experts=E, k=2, capacity_factor=1.0),
    "xmoe": lambda: fusedmoe.gates.XMoE(experts=E, k=2, capacity_factor=1.5),
    "softmoe": lambda: fusedmoe.gates.SoftMoE(experts=E, slots=2),
    "expert_choice": lambda: fusedmoe.gates.ExpertChoice(experts=E, k=2, capacity_factor=1.0),
    "batch_prioritised": lambda: fusedmoe.gates.BatchPrioritised(experts=E, k=2, capacity_factor=0.7),
    "hash": lambda: fusedmoe.gates.Hash(experts=E, k=2, capacity_factor=1.0),
    "random": lambda: fusedmoe.gates.Random(experts=E, k=2, capacity_factor=1.0),
    "deepseek_v3": lambda: fusedmoe.gates.DeepSeekV3(experts=E, k=2, groups=4, groups_kept=2),
}
ORDERS: dict[str, Callable[[], Order]] = {"sparse": Sparse, "dropless": Dropless, "einsum": Einsum}
EXPERTS: dict[str, Callable[[], Experts]] = {
    "swiglu": lambda: SwiGLU(H),
    "feed_forward": lambda: FeedForward(H, "gelu", bias=True),
    "custom": lambda: Custom(ShardedExpert),
}
# world, ep, esp, mp
SHAPES = [
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (4, 2, 2, 1),
    (4, 2, 2, 2),
    (4, 4, 1, 1),
    (4, 1, 4, 2),
    (4, 2, 1, 4),
    (4, 1, 2, 1),
]


def shape_name(shape: Any) -> str | None:
    return "world{}-ep{}-esp{}-mp{}".format(*shape) if isinstance(shape, tuple) else None


def build(
    gate: str,
    order: str,
    experts: str,
    topology: Topology | None,
    dispatch: str = "direct",
    mp_input: MpInput = "split",
) -> MoELayer:
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        GATES[gate](),
        EXPERTS[experts](),
        order=ORDERS[order](),
        topology=topology,
        dispatch=dispatch,
        shared=SwiGLU(3) if gate == "deepseek_v3" else None,
        mp_input=mp_input,
        dtype=torch.float64,
    )
    with torch.no_grad():  # the small initial values of a gate would let errors in its gradient hide
        for parameter in layer.gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def inputs(world: int, mp: int, mp_input: MpInput) -> tuple[list[Tensor], list[Tensor]]:
    """x and dy of every rank; over an MP group both are the same when replicated, and dy when partial."""
    generator = torch.Generator().manual_seed(3)

    def draw(replicated: bool) -> list[Tensor]:
        sizes = [TOKENS[r // mp * mp] if mp_input != "split" else TOKENS[r] for r in range(world)]
        drawn = [torch.randn(size, M, dtype=torch.float64, generator=generator) for size in sizes]
        return [drawn[r // mp * mp] if replicated else drawn[r] for r in range(world)]

    return draw(mp_input == "replicated"), draw(mp_input != "split")


def noise(rank: int) -> None:
    torch.manual_seed(100 + rank)


def dense(layer: MoELayer, world: int, mp: int, mp_input: MpInput, dropless: bool) -> dict[int, dict[str, Tensor]]:
    """For every rank: y, aux and dx as the parallel layer must give them. Gradients gather in `layer`."""
    x, dy = inputs(world, mp, mp_input)
    x = [t.requires_grad_() for t in x]
    loss = torch.zeros((), dtype=torch.float64)
    y: list[Tensor] = []
    aux: list[Tensor] = []
    for rank in range(world):
        mine = x[rank]
        if mp_input != "split":
            group = range(rank // mp * mp, rank // mp * mp + mp)
            whole = x[rank] if mp_input == "replicated" else sum((x[r] for r in group), torch.zeros_like(x[rank]))
            counts = [min(c, len(whole)) for c in _chunk(len(whole), mp)]
            mine = whole.split(counts)[rank % mp]
        noise(rank)
        part, loss_of_gate = dense_forward(layer, mine, dropless)
        y.append(part)
        aux.append(loss_of_gate)
    results: dict[int, dict[str, Tensor]] = {}
    for rank in range(world):
        group = range(rank // mp * mp, rank // mp * mp + mp)
        share = torch.stack([aux[r] for r in group]).mean()
        if mp_input == "split":
            results[rank] = {"y": y[rank], "aux": aux[rank] / mp}
            loss = loss + (y[rank] * dy[rank]).sum() + 0.3 * aux[rank] / mp
        else:
            results[rank] = {"y": torch.cat([y[r] for r in group]), "aux": share}
            if rank % mp == 0:  # the loss of the group is counted once
                loss = loss + (results[rank]["y"] * dy[rank]).sum() + 0.3 * share
    loss.backward()
    for rank in range(world):
        grad = x[rank].grad
        results[rank]["dx"] = torch.zeros_like(x[rank]) if grad is None else grad
    return results


def _chunk(rows: int, parts: int) -> list[int]:
    sizes = [len(part) for part in torch.arange(rows).chunk(parts)] if rows else []
    return sizes + [0] * (parts - len(sizes))


def close(what: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    error = (got - expected).norm() / expected.norm().clamp(min=1e-3)
    assert error <= 1e-10, (what, float(error))


def compare(rank: int, topology: Topology, layer: MoELayer, whole: MoELayer, case: tuple[str, ...]) -> None:
    """Gradients of this rank's parameters, summed over the ranks that hold copies, equal the dense layer's."""
    dense_grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        owner, _, own = name.partition(".")
        shard = layer.experts.shardings.get(own) if owner == "experts" else None
        whole_on_each = topology.dp if layer.mp_input != "split" else topology.world
        all_reduce(whole_on_each if shard is None else topology.edp, grad)
        if shard is not None and NAMED in shard.values():
            split = own.endswith(".b")  # ShardedExpert divides A by columns and B by rows
            full = dense_grads[name.split("_shard")[0] + name[name.rindex(".") :] if "_shard" in name else name]
            expected = full.chunk(topology.esp.size, 0 if split else 1)[topology.esp.index]
        else:
            expected = dense_grads[name]
            for axis, dim in (shard or {}).items():
                group = getattr(topology, axis)
                expected = expected.split(_chunk(expected.shape[dim], group.size), dim)[group.index]
        close(f"{case} gradient of {name}", grad, expected)


def equals_dense(
    rank: int,
    world: int,
    ep: int,
    esp: int,
    mp: int,
    dispatch: str,
    mp_input: MpInput,
    cases: list[tuple[str, str, str]],
) -> None:
    topology = Topology.from_sizes(ep, esp, mp, ranks_per_node=2)
    for case in cases:
        gate, order, experts = case
        whole = build(*case, None)
        layer = build(*case, topology, dispatch, mp_input)
        expected = dense(whole, world, mp, mp_input, order == "dropless")[rank]
        x, dy = inputs(world, mp, mp_input)
        mine = x[rank].requires_grad_()
        noise(rank)
        y = layer(mine)
        ((y * dy[rank]).sum() + 0.3 * layer.aux_loss).backward()
        close(f"{case} y", y, expected["y"])
        close(f"{case} aux", layer.aux_loss, expected["aux"])
        assert mine.grad is not None
        close(f"{case} dx", mine.grad, expected["dx"])
        compare(rank, topology, layer, whole, case)


ALL_CASES = list(itertools.product(GATES, ORDERS, EXPERTS))
# Every gate, every order, every expert, but not every combination of them, which are in three such parts.
PARTS = [
    [(gate, order, list(EXPERTS)[(i + j + part) % 3]) for i, gate in enumerate(GATES) for j, order in enumerate(ORDERS)]
    for part in range(3)
]
FEW_CASES = PARTS[0]


@pytest.mark.slow
def test_world_of_one() -> None:
    equals_dense(0, 1, 1, 1, 1, "direct", "replicated", ALL_CASES)


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        (1, (4, 2, 2, 2)),
        *slowly((0, (2, 2, 1, 1)), (2, (4, 1, 4, 2)), (3, (4, 2, 1, 4))),
    ],
    ids=shape_name,
)
def test_parallel(cluster: Cluster, place: int, shape: tuple[int, int, int, int]) -> None:
    """Every gate with one of the orders, each shape with another."""
    cases = FEW_CASES[place % len(ORDERS) :: len(ORDERS)]
    cluster.run(*shape[:1], equals_dense, *shape[1:], "direct", "split", cases)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["direct", "1dh", "2dh"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_parallel_every_combination(cluster: Cluster, shape: tuple[int, int, int, int], dispatch: str) -> None:
    """Every combination of gate, order and experts in each shape, and with each dispatch."""
    part = SHAPES.index(shape) + ("direct", "1dh", "2dh").index(dispatch)
    cluster.run(*shape[:1], equals_dense, *shape[1:], dispatch, "split", PARTS[part % 3])


@pytest.mark.parametrize(
    ("shape", "dispatch"),
    [
        ((4, 2, 2, 2), "2dh"),
        *slowly(((4, 2, 2, 2), "1dh")),
        *slowly(*((shape, how) for shape in ((4, 4, 1, 1), (2, 2, 1, 1)) for how in ("1dh", "2dh"))),
    ],
    ids=str,
)
def test_hierarchical_dispatch(cluster: Cluster, shape: tuple[int, int, int, int], dispatch: str) -> None:
    cluster.run(*shape[:1], equals_dense, *shape[1:], dispatch, "split", FEW_CASES[::7])


@pytest.mark.parametrize("mp_input", ["partial", *slowly("replicated")])
@pytest.mark.parametrize(
    "shape",
    [(4, 2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 1, 1, 2), (4, 2, 1, 4)))],
    ids=shape_name,
)
def test_model_parallel_inputs(cluster: Cluster, shape: tuple[int, int, int, int], mp_input: MpInput) -> None:
    cluster.run(*shape[:1], equals_dense, *shape[1:], "direct", mp_input, FEW_CASES[::4])


def bits(rank: int, world: int, dispatch: str) -> list[Tensor]:
    topology = Topology.from_sizes(world, ranks_per_node=2)
    layer = build("topk", "sparse", "swiglu", topology, dispatch).float()
    x = torch.randn(TOKENS[rank], M, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = layer(x)
    (y.square().sum() + layer.aux_loss).backward()
    return [y.detach(), *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


@pytest.mark.slow
def test_dispatch_algorithms_agree_bit_for_bit(cluster: Cluster) -> None:
    direct = cluster.run(4, bits, "direct")
    for dispatch in ("1dh", "2dh"):
        for ours, theirs in zip(direct, cluster.run(4, bits, dispatch), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_split_counts_follow_torch_chunk() -> None:
    for rows, parts in itertools.product(range(9), range(1, 5)):
        group = fusedmoe.comm.group.Group("mp", tuple(range(parts)))
        assert split_counts(rows, group) == _chunk(rows, parts)
