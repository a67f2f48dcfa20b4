"""Irregular all-to-alls: only nonzero rows are sent, results are bitwise equal, and training is unchanged."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from fusedmoe.graph import GraphBackend
from fusedmoe.graph.chunk_rows import PaddingFreeAllToAlls
from tests.cluster import Cluster
from tests.graph.models import Model, Steady, largest_difference, train
from tests.marks import slowly

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.bool: torch.uint8}
SHAPES = ((4, 3, 5), (8, 1), (2, 2, 3, 4), (4, 0, 3), (0, 3))


def exchange_every_shape(rank: int, world: int, filled: float) -> list[tuple[int, int, int]]:
    return [exchange(rank, world, shape, dtype, filled) for dtype in BITS for shape in SHAPES]


def exchange(rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype, filled: float) -> tuple[int, int, int]:
    """Return the rows of a buffer, the number of sent rows, and the number of rows with nonzero bits."""
    source = torch.Generator().manual_seed(rank + math.prod(shape))
    x = torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    full = torch.rand(shape[:-1], generator=source) < filled
    x = torch.where(full[..., None], x, torch.zeros((), dtype=dtype))
    if filled > 0 and dtype != torch.bool and shape[-1] and full.any():
        first = x[full][0]
        first.fill_(0.0)
        first[-1] = -0.0  # not the bits of 0.0
        x[full.nonzero()[0].split(1)] = first
        x[full.nonzero()[-1].split(1)] = math.nan
    x = x.transpose(0, -2).contiguous().transpose(0, -2)  # not contiguous if three-dimensional
    share = [shape[0] // world] * world
    want = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Gloo's collectives do not cover every dtype; bytes avoid that.
    dist.all_to_all_single(want.view(torch.uint8), x.contiguous().view(torch.uint8), share, share)
    irregular = PaddingFreeAllToAlls()
    got = irregular.wait(irregular.start(x, world, dist.group.WORLD.group_name))
    assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got.view(BITS[dtype]), want.view(BITS[dtype]))
    bits_NM = x.flatten(0, -2).contiguous().view(BITS[dtype])
    return irregular.rows, irregular.sent, int((bits_NM != 0).any(-1).sum())


@pytest.mark.parametrize("filled", [0.0, 0.5, *slowly(1.0)])
def test_irregular_all_to_all_is_bitwise_equal(cluster: Cluster, filled: float) -> None:
    for found in cluster.run(2, exchange_every_shape, filled):
        for (rows, sent, wanted), shape in zip(found, len(BITS) * SHAPES, strict=True):
            assert rows == math.prod(shape[:-1]) and sent == wanted
            assert sent == 0 if filled == 0 else sent <= rows
        assert filled == 0 or sum(sent for _, sent, _ in found) > 0


def train_irregular(rank: int, world: int, k: int, chunks: int, blocks: int, factor: float) -> tuple[float, int, int]:
    """Return the largest difference from eager training, the rows of all passes, and the sent rows."""
    torch._dynamo.reset()
    model = Model(k, blocks, factor=factor).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady(), chunks=chunks, groups=1, own_places=False, irregular=True)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    theirs = train(plain, plain, rank)
    worst = largest_difference(ours, theirs)
    assert backend.irregular is not None
    return worst, backend.irregular.rows, backend.irregular.sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "k", "chunks", "blocks", "factor"),
    [
        (2, 1, 2, 1, 1.0),
        pytest.param(2, 1, 4, 2, 1.0, marks=pytest.mark.slow),
        pytest.param(4, 2, 2, 2, 2.0, marks=pytest.mark.slow),
        pytest.param(1, 2, 1, 2, 0.5, marks=pytest.mark.slow),
    ],
)
def test_training_with_irregular_all_to_alls_equals_eager(
    cluster: Cluster, world_size: int, k: int, chunks: int, blocks: int, factor: float
) -> None:
    found = cluster.run(world_size, train_irregular, k, chunks, blocks, factor)
    tokens, steps = 32, 5
    capacity = int(factor * k * tokens / 4)
    buffers = found[0][1] / (4 * capacity)
    # Dispatch and combine, forward and backward. Backward micro-batches may split columns: each then has all the rows.
    assert 4 * blocks * steps <= buffers <= 4 * chunks * blocks * steps and buffers == int(buffers)
    for worst, rows, _ in found:
        assert worst < 1e-10
        assert rows == 4 * capacity * buffers
    # At most the kept tokens are sent.
    rows, sent = (sum(one[place] for one in found) for place in (1, 2))
    assert 0 < sent <= min(rows, buffers * k * tokens * world_size) and (factor < 1 or sent < rows)


def run_unsupported(rank: int, world: int) -> tuple[int, bool]:
    """Run an all-to-all of unequal shares and an all-to-all of a vector."""
    torch._dynamo.reset()
    mine, other = (3, 1) if rank == 0 else (1, 3)

    def call(x_SM: Tensor) -> Tensor:
        y_SM = all_to_all_single(x_SM, [mine, other], [mine, other], dist.group.WORLD)
        return all_to_all_single(y_SM.sum(-1), None, None, dist.group.WORLD)

    backend = GraphBackend(costs=Steady(), irregular=True)
    x_SM = torch.arange(12.0).reshape(4, 3) * (rank + 1)
    assert backend.irregular is not None
    return backend.irregular.rows, torch.equal(torch.compile(call, backend=backend)(x_SM), call(x_SM))


def test_unequal_shares_and_vectors_stay_regular(cluster: Cluster) -> None:
    assert cluster.run(2, run_unsupported) == [(0, True)] * 2


def run_dynamic_sizes(rank: int, world: int) -> list[tuple[int, int, bool]]:
    """Run with dynamic sizes; return the total rows, the sent rows, and whether results match."""
    torch._dynamo.reset()

    def call(x_SM: Tensor) -> Tensor:
        return 2 * all_to_all_single(x_SM.relu(), None, None, dist.group.WORLD)

    backend = GraphBackend(costs=Steady(), irregular=True)
    compiled = torch.compile(call, backend=backend, dynamic=True)
    assert backend.irregular is not None
    found = []
    for tokens in (4, 6, 8):
        x_SM = torch.arange(3.0 * tokens).reshape(tokens, 3) + rank
        x_SM[1] = -1
        same = torch.equal(compiled(x_SM), call(x_SM))
        found.append((backend.irregular.rows, backend.irregular.sent, same))
    return found


def test_irregular_all_to_all_with_dynamic_sizes(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(2, run_dynamic_sizes)):
        assert found == [(4, 3, True), (10, 8, True), (18, 15, True)], rank


@pytest.mark.parametrize(("dtype", "stays"), [(torch.complex64, True), (torch.float32, False)])
def test_complex_rows_stay_regular(dtype: torch.dtype, stays: bool) -> None:
    """Complex rows are sent whole: a conjugate is a flag outside the bits."""
    graph = torch.fx.Graph()
    x_SM = graph.placeholder("x_SM")
    x_SM.meta["val"] = torch.empty(4, 3, dtype=dtype)
    start = torch.ops._c10d_functional.all_to_all_single.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    graph.output(graph.call_function(wait, (graph.call_function(start, (x_SM, [2, 2], [2, 2], "group")),)))
    PaddingFreeAllToAlls().replace_in(graph)
    assert (start in {node.target for node in graph.nodes}) == stays
