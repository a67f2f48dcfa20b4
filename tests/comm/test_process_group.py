"""Process groups shared by topologies: few, equal on all ranks whatever a rank has released, and freed on close."""

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
from fusedmoe.comm.failure.board import Board, restart_count
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.scheduled_exchange import shared_topology
from fusedmoe.tutel.impls.communicate import topology_of
from tests.cluster import Cluster, open_sockets
from tests.marks import slowly


def count_resources() -> dict[str, int]:
    """Count this process's threads and sockets, and process groups."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return {"threads": len(os.listdir("/proc/self/task")), "sockets": open_sockets(), "groups": groups}


def wait_until_released(before: dict[str, int]) -> None:
    """Wait until counts are at most the previous ones; lower if Gloo has closed leftovers of an earlier run."""
    deadline = time.monotonic() + 20.0
    while any((after := count_resources())[what] > before[what] for what in before):
        assert time.monotonic() < deadline, (after, before)
        time.sleep(0.01)


def all_reduce_over_axes(topology: Topology, rank: int) -> list[float]:
    return [
        all_reduce(getattr(topology, name), torch.tensor(10.0**rank)).item() for name in ("world", "ep", "esp", "mp")
    ]


def create_and_drop(rank: int, world: int, count: int) -> None:
    right = all_reduce_over_axes(Topology.from_sizes(2, 2, 2), rank)
    before, kept = count_resources(), []
    for number in range(count):
        topology = Topology.from_sizes(2, 2, 2)
        assert all_reduce_over_axes(topology, rank) == right
        if number % 4 == 0:
            kept.append(topology)
    wait_until_released(before)
    assert before["groups"] == 1 + 5  # the job's own; world, ep, esp, mp and dp


@pytest.mark.slow
def test_dropped_topologies_reuse_process_groups(cluster: Cluster) -> None:
    cluster.run(4, create_and_drop, 200)


def create_and_close(rank: int, world: int) -> None:
    dist.barrier()
    Topology.from_sizes(2).close()  # opens the job's connection to the store, which stays open
    gc.collect()  # leftovers of an earlier run
    before = count_resources()
    for _ in range(6):
        with Topology.from_sizes(2, 1, 2, duplex=True) as topology:
            group = topology.subgroup("both", (0, 1))
            all_reduce(topology.duplicate_group(topology.ep, "a test"), torch.ones(1))
            assert topology.dense_mesh is not None
    del topology
    gc.collect()
    wait_until_released(before)
    with pytest.raises(ConfigError, match="this topology was closed"):
        all_reduce(group, torch.ones(1))


def test_close_releases_threads_sockets_and_groups(cluster: Cluster) -> None:
    cluster.run(2, create_and_close)


def close_one_of_two(rank: int, world: int) -> None:
    first, second = Topology.from_sizes(2), Topology.from_sizes(2)
    assert first.ep.handle is second.ep.handle and first.dp.handle is second.dp.handle
    assert first.ep.handle is not first.dp.handle, "rows and gradients travel at the same time"
    first.close()
    first.close()
    assert all_reduce(second.ep, torch.ones(1)).item() == 2.0
    second.close()
    assert all_reduce(Topology.from_sizes(2).ep, torch.ones(1)).item() == 2.0


def test_close_preserves_groups_of_other_topology(cluster: Cluster) -> None:
    cluster.run(2, close_one_of_two)


def hold_on_one_rank(rank: int, world: int) -> None:
    """A reference held on one rank must not decide whether a group is reused: all ranks would hang."""
    first = Topology.from_sizes(2, timeout_s=20)
    keeps = first if rank == 0 else None
    first.close()
    found = [Topology.from_sizes(2, timeout_s=20), Topology.from_sizes(2, timeout_s=20 + rank)]
    found += [Topology.from_sizes(2, timeout_s=20), Topology.from_sizes(2, timeout_s=20 + rank)]
    for topology in found:
        assert all_reduce(topology.ep, torch.ones(1)).item() == 2.0
    del keeps


def test_group_reuse_ignores_references_of_single_rank(cluster: Cluster) -> None:
    cluster.run(2, hold_on_one_rank)


def close_on_one_rank(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2, timeout_s=4.0)
    if rank == 0:
        topology.close()


@pytest.mark.slow
def test_close_times_out_if_peer_does_not_close(cluster: Cluster) -> None:
    first, second = cluster.outcomes(2, close_on_one_rank)
    assert first.error is not None and first.error[0] == RankError.__name__
    assert "closing the topology" in first.error[1] and "rank 1" in first.error[1]
    assert second.error is None


def create_group_with_stopped_store(rank: int, world: int) -> str:
    """Rank 1 hosts a store, and is stopped while rank 0 creates a group over it."""
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
            patch.setattr(group, "_backend_timeout", lambda job: timedelta(seconds=job.timeout_s + 0.2))
            os.kill(pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                with pytest.raises(RankError) as caught:
                    group._make_process_group(group.Job(rank, 0.3, board), (0, 1), "a test")
                assert time.monotonic() - began < 40.0
            finally:
                os.kill(pid, signal.SIGCONT)
            text = str(caught.value)
    dist.barrier()
    return text


@pytest.mark.slow
def test_group_creation_with_stopped_store_times_out(cluster: Cluster) -> None:
    """The store client's wait, which has no time-out, ends with the job's time-out."""
    text = cluster.run(2, create_group_with_stopped_store)[0]
    assert "rank 0: making a process group over ranks [0, 1] ended because rank 0 failed in hosting the job's " in text
    assert "store: no answer for" in text and "restart the job" in text


def create_group_too_late(rank: int, world: int) -> None:
    """The world group has the job's time-out; creating another group ends at a reported failure."""
    topology, c10d, slow = Topology.from_sizes(2, timeout_s=20.0), dist.distributed_c10d, threading.Event()
    handle, make = topology.world.handle, c10d._new_process_group_helper
    assert handle is not None
    assert handle._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=22)
    before = count_resources()

    def make_slowly(*arguments: Any, **options: Any) -> Any:
        slow.wait()
        return make(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", make_slowly)
        topology.fail("a test", "it failed")
        with pytest.raises(RankError, match="failed in a test: it failed"):
            group._make_process_group(topology.job, (0, 1), "too late")
    slow.set()
    wait_until_released(before)


def test_group_created_after_timeout_is_freed(cluster: Cluster) -> None:
    cluster.run(2, create_group_too_late)


def test_connect_timeout_is_shortened_for_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's thread, which cannot be stopped, waits five times as long for each connection."""
    seconds = {}
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        seconds[backend] = [group._connect_timeout(timedelta(seconds=of)).total_seconds() for of in (1, 4, 300)]
    assert seconds == {"gloo": [1, 2, 60], "nccl": [1, 4, 300]}


def create_with_pause(rank: int, world: int, pauses: int, pause_s: float) -> None:
    """Rank 1 pauses once before it creates one of the topology's groups, longer than a fifth of the time-out."""
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
def test_pause_during_group_creation_is_tolerated(cluster: Cluster, pauses: int, pause_s: float) -> None:
    cluster.run(2, create_with_pause, pauses, pause_s)


def create_groups_of_models(rank: int, world: int) -> None:
    """Each model has its own process group, which its owner destroys."""
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
            before = count_resources()
    assert before is not None
    wait_until_released(before)


def test_groups_destroyed_by_owner_are_freed(cluster: Cluster) -> None:
    cluster.run(2, create_groups_of_models)


def create_without_threads(rank: int, world: int) -> str:
    def no_thread(*arguments: object, **options: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist.distributed_c10d, "_new_process_group_helper", no_thread)
        with pytest.raises(RankError) as caught:
            Topology.from_sizes(2, timeout_s=20)
    return str(caught.value)


def test_group_creation_without_threads_names_rank(cluster: Cluster) -> None:
    for text in cluster.run(2, create_without_threads):
        assert "rank 1 failed in making a process group: Resource temporarily unavailable. Raise the limits" in text


def wait_until_waiting(topology: Topology, rank: int) -> None:
    while not topology.world.board.wait_notes([rank])[rank].operation:
        time.sleep(0.01)


def create_with_missing_rank(rank: int, world: int) -> str:
    """Ranks 1 and 2 create a group, rank 2 is missing, and rank 0 times out waiting for rank 1."""
    topology = Topology.from_sizes(3, timeout_s=20.0)
    if rank == 2:
        assert topology.world.board.read(wait_s=20.0) is not None
        return ""
    others = [(0, 1)] if rank == 0 else [(1, 2), (0, 1)]
    if rank == 0:
        wait_until_waiting(topology, 1)
    with pytest.raises(RankError) as caught, pytest.MonkeyPatch.context() as patch:
        # Including Gloo's thread, which waits five times as long and cannot be stopped.
        patch.setattr(group, "_backend_timeout", lambda job: timedelta(seconds=1.0))
        patch.setattr(group, "_connect_timeout", lambda timeout: timedelta(seconds=0.3))
        for ranks in others:
            group._make_process_group(topology.job, ranks, f"a test of {ranks}")
    return str(caught.value)


@pytest.mark.slow
def test_rank_missing_from_group_creation_is_named(cluster: Cluster) -> None:
    for text in cluster.run(3, create_with_missing_rank)[:2]:
        assert "because rank 2 did not join making a process group: it is late or stopped" in text


def meet_with_missing_rank(rank: int, world: int) -> str:
    """Rank 1 waits for rank 2, and rank 0 for rank 1."""
    topology = Topology.from_sizes(3, timeout_s=20.0)
    if rank == 2:
        assert topology.world.board.read(wait_s=20.0) is not None
        return ""
    if rank == 0:
        wait_until_waiting(topology, 1)
    with pytest.raises(RankError) as caught:
        for ranks in [(0, 1)] if rank == 0 else [(1, 2), (0, 1)]:
            topology.job.board.all_gather_json(ranks, None, 1.0 if rank == 0 else 60.0, operation=f"meeting as {ranks}")
    return str(caught.value)


@pytest.mark.slow
def test_rank_missing_from_subgroup_exchange_is_named(cluster: Cluster) -> None:
    for text in cluster.run(3, meet_with_missing_rank)[:2]:
        assert "because rank 2 did not join meeting as (0, 1): time-out after 1 s" in text


def join_next_attempt(rank: int, world: int) -> None:
    """A store that still holds keys from the ranks of an earlier attempt, as torchrun's does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        store: Any = dist.distributed_c10d._get_default_store()
        topology = Topology.from_sizes(2, timeout_s=20.0)
        assert not store.check([f"cpu//0/{rank}"])  # the address of this process
        if rank == 1:
            topology.world.board.post(topology.world.board.rank, "the program", "a fault of the first attempt")
        assert topology.world.board.read(wait_s=20.0) is not None
        # The attempt's end: clear the process groups of the pool, and this process's state.
        group._POOL_BY_DEFAULT_GROUP.clear()
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        again = Topology.from_sizes(2, timeout_s=20.0)
        assert again.world.board.read() is None
        assert all_reduce(again.ep, torch.ones(1)).item() == 2.0


@pytest.mark.slow
def test_restart_ignores_store_keys_of_previous_attempt(cluster: Cluster) -> None:
    cluster.run(2, join_next_attempt)


def test_rejoining_node_uses_attempt_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A returning node's torchrun has counted no restarts; a store hosted by rank 0 is new in each attempt."""
    places = set()
    for restarts in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(False))
        places.add(restart_count())
    assert len(places) == 1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
    assert restart_count() not in places
