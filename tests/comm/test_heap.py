"""Symmetric heaps: every rank reaches every copy, and nothing is left of them."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from fusedmoe.comm.heap import open_heap
from fusedmoe.comm.heaps.local import local_heaps
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from tests.cluster import Cluster

CPU = torch.device("cpu")


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:fusedmoe")


def write_to_all(rank: int, world: int) -> tuple[list[int], list[int], int, int]:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    with open_heap(topology.ep, CPU) as heap:
        first, second = heap.allocate((world, 5), torch.int32), heap.allocate((), torch.float64)
        assert first.own.shape == (world, 5) and not first.own.any() and second.own.item() == 0
        topology.agree({}, "test")  # all have looked before anybody writes
        mine = torch.full((5,), 10 + rank, dtype=torch.int32)
        for address in first.table.tolist():
            ctypes.memmove(address + rank * mine.nbytes, mine.data_ptr(), mine.nbytes)
        topology.agree({}, "test")
        found, inside = first.own[:, 0].tolist(), mapped()
        assert first.own.data_ptr() == int(first.table[rank]) and first.own.data_ptr() % 256 == 0
    del first, second
    return found, [10 + r for r in range(world)], inside, mapped()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_memory(cluster: Cluster, world: int) -> None:
    for found, wanted, inside, after in cluster.run(world, write_to_all):
        assert found == wanted and inside == 2 * world and after == 0
    assert not list(Path("/dev/shm").glob("*fusedmoe*"))


def after_an_error(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    heap = open_heap(topology.ep, CPU)
    with pytest.raises(ZeroDivisionError), heap:
        heap.allocate((3,), torch.uint8)
        raise ZeroDivisionError  # on all ranks alike: nobody waits for anybody
    with pytest.raises(RankError, match="left after an error; open a new one"):
        heap.allocate((3,), torch.uint8)
    with open_heap(topology.ep, CPU) as fresh:
        return str(fresh.allocate((3,), torch.uint8).own.tolist())


def test_an_abandoned_heap_is_not_used_again(cluster: Cluster) -> None:
    assert cluster.run(2, after_an_error) == ["[0, 0, 0]"] * 2


def test_virtual_ranks() -> None:
    heaps = local_heaps(3, CPU)
    copies = [heap.allocate((2, 2), torch.int64) for heap in heaps]
    assert all(torch.equal(copy.table, copies[0].table) for copy in copies)
    assert [copy.own.data_ptr() for copy in copies] == copies[0].table.tolist()


def test_what_does_not_work_says_why() -> None:
    topology = Topology()
    with pytest.raises(ConfigError, match="unknown heap backend 'smoke'; choose one of shm, symm"):
        open_heap(topology.ep, CPU, "smoke")
    with pytest.raises(ConfigError, match="symm: it is memory of CUDA GPUs; CPUs take shm"):
        open_heap(topology.ep, CPU, "symm")
