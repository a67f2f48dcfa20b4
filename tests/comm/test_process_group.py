"""The process groups that topologies share: few, agreed on whatever a rank has dropped, and freed when closed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedmoe.comm import group
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.failure.board import Board, attempt
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.scheduled_exchange import shared_topology
from fusedmoe.tutel.impls.communicate import topology_of
from tests.cluster import Cluster, open_sockets
from tests.marks import slowly


def held() -> dict[str, int]:
    """Threads and sockets of this process, and process groups."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return {"threads": len(os.listdir("/proc/self/task")), "sockets": open_sockets(), "groups": groups}


def settle(before: dict[str, int]) -> None:
    """Waits until no more is held than before; less, where Gloo has only now closed what an earlier run left."""
    deadline = time.monotonic() + 20.0
    while any((after := held())[what] > before[what] for what in before):
        assert time.monotonic() < deadline, (after, before)
        time.sleep(0.01)


def sums(topology: Topology, rank: int) -> list[float]:
    return [
        all_reduce(getattr(topology, name), torch.tensor(10.0**rank)).item() for name in ("world", "ep", "esp", "mp")
    ]


def made_and_dropped(rank: int, world: int, count: int) -> None:
    right = sums(Topology.from_sizes(2, 2, 2), rank)
    before, kept = held(), []
    for number in range(count):
        topology = Topology.from_sizes(2, 2, 2)
        assert sums(topology, rank) == right
        if number % 4 == 0:
            kept.append(topology)
    settle(before)
    assert before["groups"] == 1 + 5  # the job's own; world, ep, esp, mp and dp


@pytest.mark.slow
def test_many_topologies(cluster: Cluster) -> None:
    cluster.run(4, made_and_dropped, 200)


def closed(rank: int, world: int) -> None:
    dist.barrier()
    Topology.from_sizes(2).close()  # the job's line to the store stays, for its whole life
    gc.collect()  # what an earlier run left
    before = held()
    for _ in range(6):
        with Topology.from_sizes(2, 1, 2, duplex=True) as topology:
            group = topology.subgroup("both", (0, 1))
            all_reduce(topology.beside(topology.ep, "a test"), torch.ones(1))
            assert topology.dense_mesh is not None
    del topology
    gc.collect()
    settle(before)
    with pytest.raises(ConfigError, match="this topology was closed"):
        all_reduce(group, torch.ones(1))


def test_closing_frees_everything(cluster: Cluster) -> None:
    cluster.run(2, closed)


def closed_beside_another(rank: int, world: int) -> None:
    first, second = Topology.from_sizes(2), Topology.from_sizes(2)
    assert first.ep.handle is second.ep.handle and first.dp.handle is second.dp.handle
    assert first.ep.handle is not first.dp.handle, "rows and gradients travel at the same time"
    first.close()
    first.close()
    assert all_reduce(second.ep, torch.ones(1)).item() == 2.0
    second.close()
    assert all_reduce(Topology.from_sizes(2).ep, torch.ones(1)).item() == 2.0


def test_what_another_topology_uses_stays(cluster: Cluster) -> None:
    cluster.run(2, closed_beside_another)


def kept_on_one_rank(rank: int, world: int) -> None:
    """What one rank still holds must not decide whether a group is the old one: all would wait for each other."""
    first = Topology.from_sizes(2, timeout_s=20)
    keeps = first if rank == 0 else None
    first.close()
    found = [Topology.from_sizes(2, timeout_s=20), Topology.from_sizes(2, timeout_s=20 + rank)]
    found += [Topology.from_sizes(2, timeout_s=20), Topology.from_sizes(2, timeout_s=20 + rank)]
    for topology in found:
        assert all_reduce(topology.ep, torch.ones(1)).item() == 2.0
    del keeps


def test_ranks_that_hold_different_ones(cluster: Cluster) -> None:
    cluster.run(2, kept_on_one_rank)


def only_one_closes(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2, timeout_s=4.0)
    if rank == 0:
        topology.close()


@pytest.mark.slow
def test_a_rank_that_does_not_close(cluster: Cluster) -> None:
    first, second = cluster.outcomes(2, only_one_closes)
    assert first.error is not None and first.error[0] == RankError.__name__
    assert "closing the topology" in first.error[1] and "rank 1" in first.error[1]
    assert second.error is None


def beside_a_stopped_store(rank: int, world: int) -> str:
    """Rank 1 hosts a store, and is stopped when rank 0 makes a group over it."""
    every, text = [(0, 0), (0, 0)], ""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank else None
    dist.all_gather_object(every, (os.getpid(), store.port if store is not None else 0))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            pid, port = every[1]
            client = dist.TCPStore("127.0.0.1", port, is_master=False)
            board = Board(client, rank)
            assert board.read() is None
            patch.setattr(group, "default_store", lambda: client)
            patch.setattr(group, "_patience", lambda job: timedelta(seconds=job.timeout_s + 0.2))
            os.kill(pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                with pytest.raises(RankError) as caught:
                    group._make(group.Job(rank, 0.3, board), (0, 1), "a test")
                assert time.monotonic() - began < 40.0
            finally:
                os.kill(pid, signal.SIGCONT)
            text = str(caught.value)
    dist.barrier()
    return text


@pytest.mark.slow
def test_a_stopped_store(cluster: Cluster) -> None:
    """The wait of the store's client, which has none of its own, ends with the job's."""
    text = cluster.run(2, beside_a_stopped_store)[0]
    assert "rank 0: making a process group over ranks [0, 1] ended because rank 0 failed in hosting the job's " in text
    assert "store: no answer for" in text and "start the job again" in text


def made_too_late(rank: int, world: int) -> None:
    """Of these ranks one group has the time-outs of the job; they then wait for another one no longer."""
    topology, c10d, slow = Topology.from_sizes(2, timeout_s=20.0), dist.distributed_c10d, threading.Event()
    handle, make = topology.world.handle, c10d._new_process_group_helper
    assert handle is not None
    assert handle._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=22)
    before = held()

    def make_slowly(*arguments: Any, **options: Any) -> Any:
        slow.wait()
        return make(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", make_slowly)
        topology.fail("a test", "it failed")
        with pytest.raises(RankError, match="failed in a test: it failed"):
            group._make(topology.job, (0, 1), "too late")
    slow.set()
    settle(before)


def test_a_group_that_is_made_too_late_is_freed(cluster: Cluster) -> None:
    cluster.run(2, made_too_late)


def test_who_makes_a_group_does_not_wait_long_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's thread, which nothing can end, waits for each five times as long."""
    seconds = {}
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        seconds[backend] = [group._to_connect(timedelta(seconds=of)).total_seconds() for of in (1, 4, 300)]
    assert seconds == {"gloo": [1, 2, 60], "nccl": [1, 4, 300]}


def pausing(rank: int, world: int, pauses: int, pause_s: float) -> None:
    """Rank 1 pauses once before it makes one of the topology's groups, longer than a fifth of the time-out."""
    c10d, made = dist.distributed_c10d, 0
    make = c10d._new_process_group_helper

    def make_late(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if rank == 1 and made == pauses:
            time.sleep(pause_s)
        return make(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", make_late)
        topology = Topology.from_sizes(2, timeout_s=10.0)
    assert made >= pauses
    for _ in range(2):
        assert all_reduce(topology.ep, torch.ones(1)).item() == 2.0
    gc.collect()
    assert all_reduce(topology.world, torch.ones(1)).item() == 2.0
    topology.close()


@pytest.mark.parametrize(("pauses", "pause_s"), [(2, 3.0), *slowly((1, 7.0), (3, 7.0))])
def test_a_pause_while_groups_are_made(cluster: Cluster, pauses: int, pause_s: float) -> None:
    cluster.run(2, pausing, pauses, pause_s)


def groups_of_models(rank: int, world: int) -> None:
    """Each model has a process group of its own, which its owner destroys."""
    every, before = list(range(world)), None
    for number in range(5):
        handle = dist.new_group(every)
        topology = shared_topology(handle, timeout_s=20.0)
        tutel = topology_of(handle)
        for members in (topology.ep, topology.world, topology.dp, tutel.ep):
            assert all_reduce(members, torch.ones(1)).item() == world
        del topology, tutel
        dist.destroy_process_group(handle)
        del handle
        if number == 0:
            before = held()
    assert before is not None
    settle(before)


def test_groups_that_their_owner_destroys_are_freed(cluster: Cluster) -> None:
    cluster.run(2, groups_of_models)


def without_threads(rank: int, world: int) -> str:
    def no_thread(*arguments: object, **options: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist.distributed_c10d, "_new_process_group_helper", no_thread)
        with pytest.raises(RankError) as caught:
            Topology.from_sizes(2, timeout_s=20)
    return str(caught.value)


def test_a_rank_that_has_no_room_for_threads(cluster: Cluster) -> None:
    for text in cluster.run(2, without_threads):
        assert "rank 1 failed in making a process group: Resource temporarily unavailable. Raise its limits" in text


def until_it_waits(topology: Topology, rank: int) -> None:
    while not topology.world.board.waiting([rank])[rank].operation:
        time.sleep(0.01)


def one_is_late(rank: int, world: int) -> str:
    """Ranks 1 and 2 make a group when rank 2 does not come, so that rank 0 waits in vain for rank 1."""
    topology = Topology.from_sizes(3, timeout_s=20.0)
    if rank == 2:
        assert topology.world.board.read(wait_s=20.0) is not None
        return ""
    others = [(0, 1)] if rank == 0 else [(1, 2), (0, 1)]
    if rank == 0:
        until_it_waits(topology, 1)
    with pytest.raises(RankError) as caught, pytest.MonkeyPatch.context() as patch:
        # Of Gloo's thread, too, which waits five times as long and which nothing can end.
        patch.setattr(group, "_patience", lambda job: timedelta(seconds=1.0))
        patch.setattr(group, "_to_connect", lambda patience: timedelta(seconds=0.3))
        for ranks in others:
            group._make(topology.job, ranks, f"a test of {ranks}")
    return str(caught.value)


@pytest.mark.slow
def test_who_has_not_come_is_named(cluster: Cluster) -> None:
    for text in cluster.run(3, one_is_late)[:2]:
        assert "because rank 2 failed in making a process group: it did not come" in text


def one_meets_late(rank: int, world: int) -> str:
    """Rank 1 waits for rank 2, and rank 0 for rank 1."""
    topology = Topology.from_sizes(3, timeout_s=20.0)
    if rank == 2:
        assert topology.world.board.read(wait_s=20.0) is not None
        return ""
    if rank == 0:
        until_it_waits(topology, 1)
    with pytest.raises(RankError) as caught:
        for ranks in [(0, 1)] if rank == 0 else [(1, 2), (0, 1)]:
            topology.job.board.meet(ranks, None, 1.0 if rank == 0 else 60.0, operation=f"meeting as {ranks}")
    return str(caught.value)


@pytest.mark.slow
def test_who_has_not_met_is_named(cluster: Cluster) -> None:
    for text in cluster.run(3, one_meets_late)[:2]:
        assert "because rank 2 failed in meeting as (0, 1): did not come within 1 s" in text


def next_attempt(rank: int, world: int) -> None:
    """A store that has kept what the ranks of an earlier attempt have written, as torchrun's does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        store: Any = dist.distributed_c10d._get_default_store()
        topology = Topology.from_sizes(2, timeout_s=20.0)
        assert not store.check([f"cpu//0/{rank}"])  # the address of this process
        if rank == 1:
            topology.world.board.post(topology.world.board.rank, "the program", "a fault of the first attempt")
        assert topology.world.board.read(wait_s=20.0) is not None
        # Its end: the process groups of the pool, and what this process knows of it.
        group._OF_JOB.clear()
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        again = Topology.from_sizes(2, timeout_s=20.0)
        assert again.world.board.read() is None
        assert all_reduce(again.ep, torch.ones(1)).item() == 2.0


@pytest.mark.slow
def test_an_attempt_reads_nothing_of_the_one_before(cluster: Cluster) -> None:
    cluster.run(2, next_attempt)


def test_a_node_that_comes_back_is_in_the_attempt_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun has counted no restarts, theirs have; where rank 0 hosts the store it is a new one each time."""
    places = set()
    for restarts in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(False))
        places.add(attempt())
    assert len(places) == 1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
    assert attempt() not in places
