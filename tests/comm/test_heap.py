"""Symmetric heaps: every rank reaches every copy, and nothing is left of them."""

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


def mapped() -> int:
    """The heap's files that this process maps; none has a name in /dev/shm, where a killed rank would leave it."""
    gc.collect()
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if "fusedmoe" in line]
    assert not any("/dev/shm/" in line for line in files)
    return sum("memfd:fusedmoe" in line for line in files)


def write_to_all(rank: int, world: int) -> tuple[list[int], list[int], int, int]:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    with open_heap(topology.ep, CPU) as opened:
        first, second = opened.allocate((world, 5), torch.int32), opened.allocate((), torch.float64)
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


def after_an_error(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    opened = open_heap(topology.ep, CPU)
    with pytest.raises(ZeroDivisionError), opened:
        opened.allocate((3,), torch.uint8)
        raise ZeroDivisionError  # on all ranks alike: nobody waits for anybody
    with pytest.raises(RankError, match="left after an error; open a new one"):
        opened.allocate((3,), torch.uint8)
    with open_heap(topology.ep, CPU) as fresh:
        return str(fresh.allocate((3,), torch.uint8).own.tolist())


def test_an_abandoned_heap_is_not_used_again(cluster: Cluster) -> None:
    assert cluster.run(2, after_an_error) == ["[0, 0, 0]"] * 2


def fails_to_map(rank: int, world: int, number: int) -> tuple[str, int]:
    """Rank 1 has no memory for what rank 0 has made; rank 0 comes to rank 1's when that is closed, or another's."""
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    real = heaps._view

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
            heaps._view = view
            opened.allocate((3,), torch.uint8)
    except (RankError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", mapped()
    finally:
        heaps._view = real
    return "no error", mapped()


@pytest.mark.parametrize("number", [0, errno.ENOMEM])
def test_a_rank_without_memory_for_a_heap(cluster: Cluster, number: int) -> None:
    (other, left), (own, kept) = cluster.run(2, fails_to_map, number)
    if number:
        assert "rank 1: allocation on the host heap over the ep group [0, 1]: no memory to map" in own
    else:
        assert own == "MemoryError: no room"
    assert other.startswith(
        "RankError: rank 0: allocation on the host heap over the ep group [0, 1] ended because rank 1 "
    )
    assert ("Raise its limits" if number else "MemoryError: no room") in other and left == kept == 0


def test_another_file_of_that_number_is_not_opened() -> None:
    file = heaps._new_file(100)
    try:
        with pytest.raises(FileNotFoundError, match="it is another file by now"):
            heaps._view(f"/proc/self/fd/{file}", 100, os.fstat(file).st_ino + 1)
    finally:
        os.close(file)


def test_virtual_ranks() -> None:
    heaps = local_heaps(3, CPU)
    copies = [one.allocate((2, 2), torch.int64) for one in heaps]
    assert all(torch.equal(copy.table, copies[0].table) for copy in copies)
    assert [copy.own.data_ptr() for copy in copies] == copies[0].table.tolist()


def test_what_does_not_work_says_why() -> None:
    topology = Topology()
    with pytest.raises(ConfigError, match="unknown heap backend 'smoke'; choose one of host, symm, nvshmem"):
        open_heap(topology.ep, CPU, "smoke")
    for name in ("symm", "nvshmem"):
        with pytest.raises(ConfigError, match=f"on cpu: {name}: rank 0: it is memory of CUDA GPUs; CPUs take host"):
            open_heap(topology.ep, CPU, name)
    with pytest.raises(ConfigError, match="on cuda: host: rank 0: it is memory of the host; GPUs take symm or nvshmem"):
        open_heap(topology.ep, GPU, "host")


# Of both ranks: their hosts, why there is no symm and no nvshmem; then what is chosen, and what is said.
CHOICES = {
    "one node": (["a", "a"], ["", ""], ["not built", "not built"], "symm", ""),
    "two nodes": (["a", "b"], ["", ""], ["", ""], "nvshmem", ""),
    "GPUs apart": (["a", "a"], ["", "GPUs 0 and 1 do not reach each other"], ["", ""], "nvshmem", ""),
    "two nodes, nothing built": (
        ["a", "b"],
        ["", ""],
        ["", "not built"],
        "",
        "symm: it joins ranks of one host, but rank 0 is on a, rank 1 on b. nvshmem: rank 1: not built",
    ),
    "no GPU at rank 0": (
        ["a", "a"],
        ["no GPU", ""],
        ["no GPU", "not built"],
        "",
        "symm: rank 0: no GPU. nvshmem: rank 0: no GPU; rank 1: not built",
    ),
}


def stand_in(backend: type[Heap], name: str, reason: str) -> type[Heap]:
    """A backend that does not work for `reason`; to open it returns its name."""
    opens = {"__new__": lambda cls, group, device: name, "why_not": staticmethod(lambda device: reason)}
    return type("StandIn", (backend,), opens)


def choose_on_ranks(rank: int, world: int) -> list[tuple[str, str, str]]:
    ep, found = Topology.from_sizes(ep=world, timeout_s=20).ep, []
    with pytest.MonkeyPatch.context() as patch:
        for hosts, symm, nvshmem, _, _ in CHOICES.values():
            patch.setattr(heaps, "_host", lambda name=hosts[rank]: (name, ""))
            for name, reasons in (("symm", symm), ("nvshmem", nvshmem)):
                patch.setitem(heaps.BACKENDS, name, stand_in(heaps.BACKENDS[name], name, reasons[rank]))
            try:
                said = str(open_heap(ep, GPU))
            except ConfigError as error:
                said = str(error)
            found.append((*find_backend(ep, GPU), said))
    return found


def test_ranks_choose_alike(cluster: Cluster) -> None:
    here, there = cluster.run(2, choose_on_ranks)
    assert here == there
    for (name, reason, said), (*_, chosen, words) in zip(here, CHOICES.values(), strict=True):
        assert (name, reason) == (chosen, words)
        assert said == (chosen or f"no symmetric heap over the ep group [0, 1] on cuda: {words}")


def host_of_ranks(rank: int, world: int) -> str:
    ep = Topology.from_sizes(ep=world, timeout_s=20).ep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heaps, "_host", lambda: ("a", str(rank)))
        with pytest.raises(ConfigError) as caught:
            open_heap(ep, CPU)
    return str(caught.value)


def test_shared_memory_needs_one_host(cluster: Cluster) -> None:
    """Also where hosts have the same name."""
    for said in cluster.run(2, host_of_ranks):
        assert said.endswith("on cpu: host: it joins ranks of one host, but rank 0 is on a, rank 1 on a")
