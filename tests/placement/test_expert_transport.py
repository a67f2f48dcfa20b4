"""Sparse collectives between two placements, on ranks that are late, fail or have nothing to send."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.placement.baselines import predicted_volume
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.placement.expert_transport import SparseCollectives
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import gather_transfers, link_bytes, reduce_transfers
from tests.cluster import Cluster
from tests.marks import slowly

SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (5,), ())
# Longer than a small receive buffer.
LONG: tuple[tuple[int, ...], ...] = ((3, 2), (11000,))


def random_placement(draw: random.Random, ranks: int, experts: int) -> Placement:
    """Draw any owners, also none for some ranks, and any replicas."""
    owners = tuple(draw.randrange(ranks) for _ in range(experts))
    return Placement(
        ranks,
        owners,
        tuple(tuple(rank for rank in range(ranks) if rank != owner and draw.random() < 0.4) for owner in owners),
    )


def random_subset_of_replicas(draw: random.Random, placement: Placement) -> Placement:
    kept = tuple(tuple(rank for rank in of if draw.random() < 0.5) for of in placement.replicas)
    return Placement(placement.num_ranks, placement.owners, kept)


def random_parameters(expert: int, dtype: torch.dtype, shapes: Any = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(expert)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def random_gradients(rank: int, expert: int, dtype: torch.dtype, shapes: Any = SHAPES) -> list[torch.Tensor]:
    return random_parameters(1000 * (rank + 1) + expert, dtype, shapes)


def experts_on_rank(placement: Placement, rank: int) -> list[int]:
    """Owned experts first, as in a layer; replicas not in the order of their numbers."""
    return [*placement.owned(rank), *(e for e in reversed(range(placement.experts)) if rank in placement.replicas[e])]


def run_random_exchanges(rank: int, world: int, seeds: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """Exchange random pairs of placements; return the number of exchanges that moved an expert."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    return exchange_random_placements(
        SparseCollectives(topology.duplicate_group(topology.ep, "experts")), rank, world, seeds, dtypes, SHAPES
    )


def exchange_by_puts(rank: int, world: int, seeds: int) -> int:
    """The same in Triton's interpreter, through a receive buffer that is smaller than an expert."""
    from fusedmoe.comm.one_sided.heaps import open_heap
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll

    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    with open_heap(topology.ep, torch.device("cpu")) as heap:
        sparse = SparseCollectives(topology.ep, OneSidedAllToAll(heap, rows=16))
        return exchange_random_placements(sparse, rank, world, seeds, (torch.float64, torch.bfloat16), LONG)


def exchange_random_placements(
    sparse: SparseCollectives, rank: int, world: int, seeds: int, dtypes: Any, shapes: Any
) -> int:
    moved = 0
    for seed in range(seeds):
        draw = random.Random(seed)
        node_layout = NodeLayout(world, draw.choice([n for n in (1, 2, 4) if world % n == 0]))
        dtype = draw.choice(dtypes)
        after = random_placement(draw, world, draw.randint(1, 7))
        before = random_subset_of_replicas(draw, after)
        held, rows = experts_on_rank(after, rank), {}
        rows = {expert: row for row, expert in enumerate(held)}
        tables = [torch.full((max(1, len(held)), *shape), float("nan"), dtype=dtype) for shape in shapes]
        for expert in set(experts_on_rank(before, rank)):
            for table, value in zip(tables, random_parameters(expert, dtype, shapes), strict=True):
                table[rows[expert]] = value
        transfers = gather_transfers(before, after, node_layout)
        work = sparse.gather(transfers, rows, tables)
        assert work.wait() == []
        for expert in held:
            for table, value in zip(tables, random_parameters(expert, dtype, shapes), strict=True):
                assert torch.equal(table[rows[expert]], value), (seed, expert)
        bytes_ = sum(value.nbytes for value in random_parameters(0, dtype, shapes))
        assert work.sent_bytes == bytes_ * sum(one.source == rank for one in transfers)
        counted = link_bytes(transfers, node_layout, bytes_)
        assert counted[::2].sum() == predicted_volume(before, after, node_layout, bytes_).total
        assert work.sent_bytes == counted[::2, rank].sum()

        whole = gather_transfers(after.sharding, after, node_layout)
        grads = [table.clone() for table in tables]
        for expert in held:
            for grad, value in zip(grads, random_gradients(rank, expert, dtype, shapes), strict=True):
                grad[rows[expert]] = value
        owned = len(after.owned(rank))
        own = [grad[:owned].to(torch.float64, copy=True) for grad in grads]
        kept = [grad[:owned].clone() for grad in grads]
        back = sparse.reduce(reduce_transfers(whole), rows, grads, owned)
        for expert, parts in back.wait():
            for total, part in zip(own, parts, strict=True):
                total[rows[expert]] += part.double()
        assert back.sent_bytes == bytes_ * sum(one.target == rank for one in whole)
        for grad, was in zip(grads, kept, strict=True):
            assert torch.equal(grad[:owned], was), (seed, grad, was, owned, held)
        tolerance = 1e-12 if dtype == torch.float64 else 0.06
        for expert in after.owned(rank):
            ranks = [rank, *after.replicas[expert]]
            for n, total in enumerate(own):
                wanted = sum(random_gradients(other, expert, dtype, shapes)[n].double() for other in ranks)
                torch.testing.assert_close(total[rows[expert]], wanted, rtol=tolerance, atol=tolerance)
        moved += bool(transfers)
    sparse.close()
    return moved


@pytest.mark.parametrize("world", [2, *slowly(4)])
def test_gather_and_reduce_between_random_placements(cluster: Cluster, world: int):
    """SparseAllGather sends the right replicas, SparseReduceScatter the right sums, in the predicted bytes."""
    assert min(cluster.run(world, run_random_exchanges, 40, (torch.float64, torch.bfloat16))) > 10


def run_concurrent_exchanges(rank: int, world: int) -> list[torch.Tensor]:
    """Several run at once, overlapped with other collectives; sums are bitwise equal for any order of arrival."""
    from fusedmoe.comm.collectives import all_reduce

    topology = Topology.from_sizes(ep=world, timeout_s=30.0)
    sparse = SparseCollectives(topology.duplicate_group(topology.ep, "experts"))
    everywhere = Placement(world, (0,), (tuple(range(1, world)),))
    back = reduce_transfers(gather_transfers(everywhere.sharding, everywhere, NodeLayout(world, 2)))
    works = []
    for number in range(8):
        grads = [torch.randn(1, 1000, generator=torch.Generator().manual_seed(10 * rank + number % 2))]
        works.append(sparse.reduce(back, {0: 0}, grads, num_owned=int(rank == 0)))
        all_reduce(topology.world, torch.ones(100))
    sums = [sum(one.parts[0] for one in work.wait()) for work in works] if rank == 0 else []
    for work in works:
        work.wait()
    sparse.close()
    return sums


def test_concurrent_exchanges_have_bitwise_equal_sums(cluster: Cluster):
    sums = cluster.run(4, run_concurrent_exchanges)[0]
    assert all(torch.equal(one, sums[number % 2]) for number, one in enumerate(sums))


def gather_without_peer(rank: int, world: int, told: Path) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=4.0)
    sparse = SparseCollectives(topology.duplicate_group(topology.ep, "experts"))
    if rank == 1:
        while not told.exists():
            time.sleep(0.05)
        return "did not come"
    both = Placement(2, (0,), ((1,),))
    work = sparse.gather(gather_transfers(both.sharding, both, NodeLayout(2, 1)), {0: 0}, [torch.ones(1, 4)])
    with pytest.raises(RankError) as caught:
        work.wait()
    told.touch()
    sparse.close()
    return str(caught.value)


@pytest.mark.slow
def test_timeout_error_names_missing_rank_and_operation(cluster: Cluster, tmp_path: Path):
    """The error names the missing rank and the pending operation."""
    message = cluster.run(2, gather_without_peer, tmp_path / "told")[0]
    assert "sparse all-gather" in message and "rank 1" in message


def fail_in_first_of_two_exchanges(rank: int, world: int) -> str:
    """Rank 0 fails in the first of two; its messages of the second have other sizes and must not be mistaken for it."""
    topology = Topology.from_sizes(ep=world)
    sparse = SparseCollectives(topology.duplicate_group(topology.ep, "experts"))
    both = Placement(2, (0,), ((1,),))
    transfers, tables = gather_transfers(both.sharding, both, NodeLayout(2, 1)), [torch.ones(1, 4)]

    @contextmanager
    def fails():
        if rank == 0:
            raise ValueError("it failed")
        yield

    with pytest.raises((ValueError, RankError)) as first:
        works = [sparse.gather(transfers, {0: 0}, tables, fails())]
        works += [sparse.gather(transfers, {0: 0}, [torch.ones(1, 9)])]
        for work in works:
            work.wait()
    with pytest.raises(RankError):
        works[1].wait()
    sparse.close()
    return str(first.value)


def test_failed_exchange_stops_later_exchanges(cluster: Cluster):
    texts = cluster.run(2, fail_in_first_of_two_exchanges)
    assert texts[0] == "it failed" and "rank 0 failed in sparse all-gather: ValueError: it failed" in texts[1]


def test_empty_exchange_needs_no_peers():
    """A world of one needs no process group; an empty transfer needs no peers."""
    sparse = SparseCollectives(Topology().ep)
    alone = Placement(1, (0, 0))
    work = sparse.gather(gather_transfers(alone, alone, NodeLayout(1, 1)), {0: 0, 1: 1}, [torch.ones(2, 3)])
    assert work.wait() == [] and work.sent_bytes == 0
    np.testing.assert_array_equal(predicted_volume(alone, alone, NodeLayout(1, 1), 8), (0, 0, 0))
