"""A parallel layer equals the dense computation: outputs, auxiliary loss and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.autograd.parallel import split_counts
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import SwiGLU
from fusedmoe.layers.moe import MpInput
from tests.cluster import Cluster
from tests.marks import slowly
from tests.oracle import EXPERTS, GATES, ORDERS, Case, M, assert_equal_to_dense, chunk_sizes, make_layer

TOKENS = [5, 0, 11, 1]  # by rank, including an empty rank and a rank with one token

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


def inputs(world: int, mp: int, mp_input: MpInput) -> tuple[list[Tensor], list[Tensor]]:
    """Return x and dy of every rank; over an MP group both are equal if replicated, and dy if partial."""
    generator = torch.Generator().manual_seed(3)

    def draw(replicated: bool) -> list[Tensor]:
        sizes = [TOKENS[r // mp * mp] if mp_input != "split" else TOKENS[r] for r in range(world)]
        drawn = [torch.randn(size, M, dtype=torch.float64, generator=generator) for size in sizes]
        return [drawn[r // mp * mp] if replicated else drawn[r] for r in range(world)]

    return draw(mp_input == "replicated"), draw(mp_input != "split")


def compare_with_dense(
    rank: int,
    world: int,
    ep: int,
    esp: int,
    mp: int,
    dispatch: str,
    mp_input: MpInput,
    cases: list[Case],
) -> None:
    topology = Topology.from_sizes(ep, esp, mp, ranks_per_node=2)
    x_W, dy_W = inputs(world, mp, mp_input)
    for case in cases:
        whole, layer = (
            make_layer(
                case, over, dispatch=way, mp_input=mp_input, shared=SwiGLU(3) if case[0] == "deepseek_v3" else None
            )
            for over, way in ((None, "direct"), (topology, dispatch))
        )
        assert_equal_to_dense(layer, whole, x_W, dy_W, case)


ALL_CASES = list(itertools.product(GATES, ORDERS, EXPERTS))
# Every gate, order and expert, in three groups instead of every combination.
PARTS = [
    [(gate, order, list(EXPERTS)[(i + j + part) % 3]) for i, gate in enumerate(GATES) for j, order in enumerate(ORDERS)]
    for part in range(3)
]
FEW_CASES = PARTS[0]


@pytest.mark.slow
def test_one_process_equals_dense() -> None:
    compare_with_dense(0, 1, 1, 1, 1, "direct", "replicated", ALL_CASES)


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        (1, (4, 2, 2, 2)),
        *slowly((0, (2, 2, 1, 1)), (2, (4, 1, 4, 2)), (3, (4, 2, 1, 4))),
    ],
    ids=shape_name,
)
def test_parallel_layer_equals_dense(cluster: Cluster, place: int, shape: tuple[int, int, int, int]) -> None:
    """Every gate with one order; each parallel shape with another order."""
    cases = FEW_CASES[place % len(ORDERS) :: len(ORDERS)]
    cluster.run(*shape[:1], compare_with_dense, *shape[1:], "direct", "split", cases)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["direct", "1dh", "2dh"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_every_combination_equals_dense(cluster: Cluster, shape: tuple[int, int, int, int], dispatch: str) -> None:
    """Every combination of gate, order and experts in each parallel shape, with each dispatch algorithm."""
    part = SHAPES.index(shape) + ("direct", "1dh", "2dh").index(dispatch)
    cluster.run(*shape[:1], compare_with_dense, *shape[1:], dispatch, "split", PARTS[part % 3])


@pytest.mark.parametrize(
    ("shape", "dispatch"),
    [
        ((4, 2, 2, 2), "2dh"),
        *slowly(((4, 2, 2, 2), "1dh")),
        *slowly(*((shape, how) for shape in ((4, 4, 1, 1), (2, 2, 1, 1)) for how in ("1dh", "2dh"))),
    ],
    ids=str,
)
def test_hierarchical_dispatch_equals_dense(cluster: Cluster, shape: tuple[int, int, int, int], dispatch: str) -> None:
    cluster.run(*shape[:1], compare_with_dense, *shape[1:], dispatch, "split", FEW_CASES[::7])


@pytest.mark.parametrize("mp_input", ["partial", *slowly("replicated")])
@pytest.mark.parametrize(
    "shape",
    [(4, 2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 1, 1, 2), (4, 2, 1, 4)))],
    ids=shape_name,
)
def test_model_parallel_inputs_equal_dense(
    cluster: Cluster, shape: tuple[int, int, int, int], mp_input: MpInput
) -> None:
    cluster.run(*shape[:1], compare_with_dense, *shape[1:], "direct", mp_input, FEW_CASES[::4])


def results_of_dispatch(rank: int, world: int, dispatch: str) -> list[Tensor]:
    topology = Topology.from_sizes(world, ranks_per_node=2)
    layer = make_layer(("topk", "sparse", "swiglu"), topology, dispatch=dispatch, mp_input="split").float()
    x = torch.randn(TOKENS[rank], M, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = layer(x)
    (y.square().sum() + layer.aux_loss).backward()
    return [y.detach(), *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


@pytest.mark.slow
def test_dispatch_algorithms_are_bitwise_equal(cluster: Cluster) -> None:
    direct = cluster.run(4, results_of_dispatch, "direct")
    for dispatch in ("1dh", "2dh"):
        for ours, theirs in zip(direct, cluster.run(4, results_of_dispatch, dispatch), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_split_counts_follow_torch_chunk() -> None:
    for rows, parts in itertools.product(range(9), range(1, 5)):
        group = fusedmoe.comm.group.Group("mp", tuple(range(parts)))
        assert split_counts(rows, group) == chunk_sizes(rows, parts)
