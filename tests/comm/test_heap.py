"""Symmetric heaps: every rank reaches every rank's memory, and closing releases all of it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import time
from pathlib import Path

import pytest
import torch

from bench.gpu.virtual_heaps import local_heaps
from fusedmoe.comm.one_sided import heaps
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.one_sided.heaps import find_backend, open_heap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from tests.cluster import Cluster

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def count_mappings() -> int:
    """Count the heap's mappings in this process; a name in /dev/shm would outlive a killed rank."""
    gc.collect()
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if "fusedmoe" in line]
    assert not any("/dev/shm/" in line for line in files)
    return sum("memfd:fusedmoe" in line for line in files)


def write_to_all(rank: int, world: int) -> tuple[list[int], list[int], int, int]:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    with open_heap(topology.ep, CPU) as opened:
        first, second = opened.allocate((world, 5), torch.int32), opened.allocate((), torch.float64)
        assert first.own.shape == (world, 5) and not first.own.any() and second.own.item() == 0
        topology.require_equal_facts({}, "test")  # all ranks have read before any rank writes
        mine = torch.full((5,), 10 + rank, dtype=torch.int32)
        for address in first.table.tolist():
            ctypes.memmove(address + rank * mine.nbytes, mine.data_ptr(), mine.nbytes)
        topology.require_equal_facts({}, "test")
        found, inside = first.own[:, 0].tolist(), count_mappings()
        assert first.own.data_ptr() == int(first.table[rank]) and first.own.data_ptr() % 256 == 0
    del first, second
    return found, [10 + r for r in range(world)], inside, count_mappings()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_writes_to_shared_heap_and_close_unmaps(cluster: Cluster, world: int) -> None:
    for found, wanted, inside, after in cluster.run(world, write_to_all):
        assert found == wanted and inside == 2 * world and after == 0


def allocate_after_error(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    opened = open_heap(topology.ep, CPU)
    with pytest.raises(ZeroDivisionError), opened:
        opened.allocate((3,), torch.uint8)
        raise ZeroDivisionError  # on all ranks alike: no rank waits
    with pytest.raises(RankError, match="abandoned after an error; open a new one"):
        opened.allocate((3,), torch.uint8)
    with open_heap(topology.ep, CPU) as fresh:
        return str(fresh.allocate((3,), torch.uint8).own.tolist())


def test_abandoned_heap_rejects_allocations(cluster: Cluster) -> None:
    assert cluster.run(2, allocate_after_error) == ["[0, 0, 0]"] * 2


def fail_to_map(rank: int, world: int, number: int) -> tuple[str, int]:
    """Rank 1 cannot map rank 0's memory; rank 0 maps rank 1's memory after it, or another heap, was closed."""
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    real = heaps._map_file

    def view(path: str, size: int, inode: int) -> torch.Tensor:
        if rank == 1:
            raise OSError(number, os.strerror(number)) if number else MemoryError("no room")
        if f"/{os.getpid()}/" not in path:
            deadline = time.monotonic() + 20
            while Path(path).exists() and "memfd:fusedmoe" in os.readlink(path) and time.monotonic() < deadline:
                time.sleep(0.001)
        return real(path, size, inode)

    try:
        with topology.guard("the test"), open_heap(topology.ep, CPU) as opened:
            heaps._map_file = view
            opened.allocate((3,), torch.uint8)
    except (RankError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", count_mappings()
    finally:
        heaps._map_file = real
    return "no error", count_mappings()


@pytest.mark.parametrize("number", [0, errno.ENOMEM])
def test_heap_mapping_failure_is_raised_on_every_rank(cluster: Cluster, number: int) -> None:
    (other, left), (own, kept) = cluster.run(2, fail_to_map, number)
    if number:
        assert "rank 1: allocation on the host heap over the ep group [0, 1]: no memory to map" in own
    else:
        assert own == "MemoryError: no room"
    assert other.startswith(
        "RankError: rank 0: allocation on the host heap over the ep group [0, 1] ended because rank 1 "
    )
    assert ("Raise its limits" if number else "MemoryError: no room") in other and left == kept == 0


def test_replaced_heap_file_is_rejected() -> None:
    file = heaps._create_anonymous_file(100)
    try:
        with pytest.raises(FileNotFoundError, match="the file was replaced"):
            heaps._map_file(f"/proc/self/fd/{file}", 100, os.fstat(file).st_ino + 1)
    finally:
        os.close(file)


def test_local_heaps_share_address_table() -> None:
    heaps = local_heaps(3, CPU)
    copies = [one.allocate((2, 2), torch.int64) for one in heaps]
    assert all(torch.equal(copy.table, copies[0].table) for copy in copies)
    assert [copy.own.data_ptr() for copy in copies] == copies[0].table.tolist()


def test_unavailable_backend_error_has_reason() -> None:
    topology = Topology()
    with pytest.raises(ConfigError, match="unknown heap backend 'smoke'; choose one of host, symm, nvshmem"):
        open_heap(topology.ep, CPU, "smoke")
    for name in ("symm", "nvshmem"):
        with pytest.raises(ConfigError, match=f"on cpu: {name}: rank 0: it uses memory of CUDA GPUs; use host on CPUs"):
            open_heap(topology.ep, CPU, name)
    with pytest.raises(ConfigError, match="on cuda: host: rank 0: it uses host memory; use symm or nvshmem on GPUs"):
        open_heap(topology.ep, GPU, "host")


# For both ranks: hosts, reasons against symm and nvshmem; then the choice, and the error.
CHOICES = {
    "one node": (["a", "a"], ["", ""], ["not built", "not built"], "symm", ""),
    "two nodes": (["a", "b"], ["", ""], ["", ""], "nvshmem", ""),
    "GPUs apart": (["a", "a"], ["", "GPUs 0 and 1 do not reach each other"], ["", ""], "nvshmem", ""),
    "two nodes, nothing built": (
        ["a", "b"],
        ["", ""],
        ["", "not built"],
        "",
        "symm: all ranks must be on one host, but rank 0 is on a, rank 1 on b. nvshmem: rank 1: not built",
    ),
    "no GPU at rank 0": (
        ["a", "a"],
        ["no GPU", ""],
        ["no GPU", "not built"],
        "",
        "symm: rank 0: no GPU. nvshmem: rank 0: no GPU; rank 1: not built",
    ),
}


def fake_backend(backend: type[Heap], name: str, reason: str) -> type[Heap]:
    """A fake backend, unavailable for `reason`; opening it returns its name."""
    opens = {"__new__": lambda cls, group, device: name, "unavailable_reason": staticmethod(lambda device: reason)}
    return type("StandIn", (backend,), opens)


def choose_on_ranks(rank: int, world: int) -> list[tuple[str, str, str]]:
    ep, found = Topology.from_sizes(ep=world, timeout_s=20).ep, []
    with pytest.MonkeyPatch.context() as patch:
        for hosts, symm, nvshmem, _, _ in CHOICES.values():
            patch.setattr(heaps, "_host_identity", lambda name=hosts[rank]: (name, ""))
            for name, reasons in (("symm", symm), ("nvshmem", nvshmem)):
                patch.setitem(heaps.BACKENDS, name, fake_backend(heaps.BACKENDS[name], name, reasons[rank]))
            try:
                said = str(open_heap(ep, GPU))
            except ConfigError as error:
                said = str(error)
            found.append((*find_backend(ep, GPU), said))
    return found


def test_ranks_choose_same_heap_backend(cluster: Cluster) -> None:
    here, there = cluster.run(2, choose_on_ranks)
    assert here == there
    for (name, reason, said), (*_, chosen, words) in zip(here, CHOICES.values(), strict=True):
        assert (name, reason) == (chosen, words)
        assert said == (chosen or f"no symmetric heap over the ep group [0, 1] on cuda: {words}")


def host_of_ranks(rank: int, world: int) -> str:
    ep = Topology.from_sizes(ep=world, timeout_s=20).ep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heaps, "_host_identity", lambda: ("a", str(rank)))
        with pytest.raises(ConfigError) as caught:
            open_heap(ep, CPU)
    return str(caught.value)


def test_host_heap_rejects_ranks_on_two_hosts(cluster: Cluster) -> None:
    """Hosts with equal names are distinguished."""
    for said in cluster.run(2, host_of_ranks):
        assert said.endswith("on cpu: host: all ranks must be on one host, but rank 0 is on a, rank 1 on a")
