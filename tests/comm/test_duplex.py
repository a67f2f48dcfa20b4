"""Both directions of a link at once: the same rows as with one process group, and the same failures."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import fusedmoe
from fusedmoe.comm.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.comm.failing import check
from tests.marks import slowly


def draw_rows(rank: int, world: int, seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Draw counts[s][d] rows from rank s to rank d, equal on every rank and often zero; and this rank's rows."""
    source = random.Random(seed)
    counts = [[source.choice((0, 0, 1, 5, 700)) for _ in range(world)] for _ in range(world)]
    if source.random() < 0.3:
        counts[source.randrange(world)] = [0] * world
    torch.manual_seed(1000 * seed + rank)
    return counts, torch.randn(sum(counts[rank]), 3)


def compare_with_one_group(rank: int, world: int, seeds: list[int]) -> None:
    plain = Topology.from_sizes(ep=world).ep
    group = Topology.from_sizes(ep=world, duplex=True).ep
    assert plain.downward is None and group.downward is not None
    for seed in seeds:
        counts, rows = draw_rows(rank, world, seed)
        recv = [counts[s][rank] for s in range(world)]
        for some in (rows, rows.to(torch.float8_e4m3fn), rows[:, 0]):
            right = all_to_all_rows(plain, some, counts[rank], recv)
            assert right.shape[0] == sum(recv)
            got = all_to_all_rows(group, some, counts[rank], recv)
            assert got.dtype == right.dtype and torch.equal(got.float(), right.float())
        sizes = counts[0]
        own, whole = torch.randn(sizes[rank], 2), torch.randn(sum(sizes), 2)
        assert torch.equal(all_gather_rows(group, own, sizes), all_gather_rows(plain, own, sizes))
        assert torch.equal(reduce_scatter_rows(group, whole, sizes), reduce_scatter_rows(plain, whole, sizes))
        even = torch.randn(4, 2)
        assert torch.equal(all_gather_rows(group, even, [4] * world), all_gather_rows(plain, even, [4] * world))


@pytest.mark.parametrize("world", [4, *slowly(2, 3)])
def test_duplex_all_to_all_equals_single_group(cluster: Cluster, world: int) -> None:
    cluster.run(world, compare_with_one_group, [random.randrange(10**6) for _ in range(8)])


def compare_layers(rank: int, world: int, dispatch: str) -> None:
    """A layer with full-duplex exchanges is bitwise equal, on both axes."""
    found = []
    for duplex in (False, True):
        topology = Topology.from_sizes(
            4 if dispatch != "direct" else 2, 1 if dispatch != "direct" else 2, ranks_per_node=2, duplex=duplex
        )
        torch.manual_seed(3)
        layer = MoELayer(
            8, fusedmoe.gates.TopK(experts=8, k=2), fusedmoe.experts.SwiGLU(6), topology=topology, dispatch=dispatch
        )
        torch.manual_seed(100 + rank)
        x = torch.randn(3 * rank, 8, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["2dh", *slowly("direct")])
def test_duplex_layer_is_bitwise_equal(cluster: Cluster, dispatch: str) -> None:
    cluster.run(4, compare_layers, dispatch)


def all_to_all_with_killed_rank(rank: int, world: int, culprit: int, after_s: float) -> None:
    group = Topology.from_sizes(ep=world, duplex=True).ep
    rows = torch.randn(4 * 20_000, 8)
    if rank == culprit:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(100_000):
        all_to_all_rows(group, rows, [20_000] * 4, [20_000] * 4)


def test_killed_rank_ends_duplex_exchange_on_others(cluster: Cluster) -> None:
    check(cluster, random.randrange(4), r"its process ended", all_to_all_with_killed_rank, random.uniform(0.0, 0.3))


def all_to_all_without_rank_1(rank: int, world: int, told: Path) -> str:
    group = Topology.from_sizes(ep=world, duplex=True, timeout_s=4.0).ep
    if rank == 1:
        while not told.exists():  # it is alive, but elsewhere
            time.sleep(0.05)
        return ""
    with pytest.raises(RankError) as raised:
        all_to_all_rows(group, torch.randn(4, 2), [2, 2], [2, 2])
    told.touch()
    return str(raised.value)


@pytest.mark.slow
def test_duplex_exchange_times_out_for_missing_rank(cluster: Cluster, tmp_path: Path) -> None:
    text, _ = cluster.run(2, all_to_all_without_rank_1, tmp_path / "told")
    assert "not all ranks joined within 4 s" in text and "rank 1" in text


def create_with_unequal_duplex(rank: int, world: int) -> str:
    with pytest.raises(RankError) as raised:
        Topology.from_sizes(ep=2, duplex=rank == 0, timeout_s=60.0)
    return str(raised.value)


def test_unequal_duplex_flag_raises_on_all_ranks(cluster: Cluster) -> None:
    assert all("duplex=True" in text and "duplex=False" in text for text in cluster.run(2, create_with_unequal_duplex))
