"""If a rank raises, is killed, is stopped or never starts, all others end soon with an error that names it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedmoe.comm.collectives import all_gather_object, all_gather_rows, all_reduce
from fusedmoe.comm.failure.blame import timeout_error
from fusedmoe.comm.failure.board import NOTE_RENEWAL_S, Board, WaitNote
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import TIMEOUT_CURE
from fusedmoe.training.data_parallel import distributed_data_parallel
from tests.cluster import Cluster
from tests.comm.failing import SOON_S, M, check, linear, make, nothing, train
from tests.marks import slowly


def die_in_ddp_wrapper(rank: int, world: int, culprit: int, calls: int) -> None:
    """Kill a rank before the wrapper compares replicas, or before it rebuilds buckets in its second forward."""
    layer = make(topology := Topology.from_sizes(4))
    for call in range(3):
        if rank == culprit and call == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        if not call:
            wrapped = distributed_data_parallel(layer, topology)
        wrapped(torch.randn(5, M)).sum().backward()


@pytest.mark.parametrize(
    ("calls", "match"),
    # The first rank to query names the operation for all ranks: one rank may be past the buckets.
    [(0, "comparing distributed_data_parallel"), *slowly((1, "agreeing on gradient buckets|exchange of counts"))],
)
def test_rank_killed_before_ddp_wrapper_is_named(cluster: Cluster, calls: int, match: str) -> None:
    check(cluster, random.randrange(4), match, die_in_ddp_wrapper, calls)


def stop_before_ddp_wrapper(rank: int, world: int, culprit: int) -> None:
    """A wait inside PyTorch, during which the board is not read."""
    layer = make(topology := Topology.from_sizes(4, timeout_s=4.0))
    pids = all_gather_object(topology.world, os.getpid())
    try:
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        distributed_data_parallel(layer, topology)
    finally:
        if rank == (culprit + 1) % world:
            os.kill(pids[culprit], signal.SIGCONT)


@pytest.mark.slow
def test_rank_stopped_before_ddp_wrapper_is_named(cluster: Cluster) -> None:
    texts = check(
        cluster, culprit := random.randrange(4), "comparing distributed_data_parallel", stop_before_ddp_wrapper
    )
    assert all(TIMEOUT_CURE in text for rank, text in enumerate(texts) if rank != culprit), texts


def fail_in_ddp_reducer(rank: int, world: int, culprit: int, way: str) -> None:
    """Fail in the backward pass of a model whose gradients only PyTorch's wrapper reduces."""
    topology = Topology.from_sizes(1, timeout_s=60.0)
    wrapped = distributed_data_parallel(nn.Sequential(*(nn.Linear(M, M) for _ in range(4))), topology)

    def strike(gradient: Tensor) -> None:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this model cannot go back")

    with topology.guard("the user's code"):
        for call in range(3):
            y = wrapped(torch.randn(5, M))
            if rank == culprit and call == 1:
                y.register_hook(strike)
            y.sum().backward()


@pytest.mark.parametrize("way", ["raises", *slowly("killed")])
def test_rank_failing_before_ddp_reducer_is_named(cluster: Cluster, way: str) -> None:
    said = {"killed": "its process ended", "raises": "ValueError: this model cannot go back"}
    check(cluster, random.randrange(4), f"backward pass of .*{said[way]}", fail_in_ddp_reducer, way)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("this expert cannot go back")


class BrokenExpert(nn.Module):
    """An expert that fails in its third forward or backward pass."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.calls, self.backward = 0, backward
        self.weight = nn.Parameter(torch.ones(M))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            if not self.backward:
                raise ValueError("this expert does not feel well")
            x = FailsInBackward.apply(x)
        return x * self.weight


def fail_in_forward(rank: int, world: int, culprit: int) -> None:
    train(_broken(Topology.from_sizes(4), False, rank == culprit))


def _broken(topology: Topology, backward: bool, is_culprit: bool) -> nn.Module:
    """A layer whose experts fail on one rank. Ranks may not construct different experts, so these are replaced."""
    layer = make(topology, linear)
    if is_culprit:
        layer.experts.experts.update({name: BrokenExpert(backward) for name in layer.experts.experts})
    return layer


def fail_in_backward(rank: int, world: int, culprit: int) -> None:
    topology = Topology.from_sizes(2)
    layer = _broken(topology, True, rank == culprit)
    with topology.guard("the training step"):
        train(layer)


def fail_in_guarded_code(rank: int, world: int, culprit: int) -> None:
    topology = Topology.from_sizes(2)
    layer = make(topology)
    with topology.guard("loading data"):
        train(layer, 3)
        if rank == culprit:
            raise FileNotFoundError("no such shard: 17")
        train(layer)


@pytest.mark.slow
def test_expert_error_in_forward_ends_all_ranks(cluster: Cluster) -> None:
    texts = check(cluster, 1, "failed in MoELayer.forward: ValueError: this expert does not feel well", fail_in_forward)
    assert texts[1] == "this expert does not feel well"


def test_expert_error_in_backward_ends_all_ranks(cluster: Cluster) -> None:
    """No rank keeps a graph, whose process groups its peers would wait for at exit."""
    texts = check(cluster, 2, "failed in the training step: ValueError: this expert cannot go back", fail_in_backward)
    assert texts[2] == "this expert cannot go back"


@pytest.mark.slow
def test_error_in_guarded_code_ends_all_ranks(cluster: Cluster) -> None:
    check(cluster, 3, "rank 3 failed in loading data: FileNotFoundError: no such shard: 17", fail_in_guarded_code)


def train_with_killed_rank(rank: int, world: int, culprit: int, ep: int, after_s: float) -> None:
    layer = make(Topology.from_sizes(ep))
    train(layer, 3)
    if rank == culprit:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(layer)


@pytest.mark.parametrize("ep", [2, *slowly(4)])
def test_rank_killed_during_exchange_ends_all_ranks(cluster: Cluster, ep: int) -> None:
    after_s = random.uniform(0.0, 0.3)
    culprit = random.randrange(4)
    check(
        cluster,
        culprit,
        r"its process ended \(an error, killed, or out of memory\)",
        train_with_killed_rank,
        ep,
        after_s,
    )


def train_with_missing_rank(rank: int, world: int, culprit: int) -> None:
    # Rank 0 times out first. It waits for rank 1, which waits for rank 3.
    topology = Topology.from_sizes(2, 2, timeout_s=60.0 if rank else 4.0)
    layer = make(topology, lambda dim, shard, shards: linear(dim))
    train(layer, 2)
    if rank == culprit:
        assert topology.world.board.read(wait_s=60.0) is not None
        return
    train(layer, 1)


@pytest.mark.slow
def test_missing_rank_times_out_and_is_named(cluster: Cluster) -> None:
    cluster.run(4, nothing)
    *outcomes, last = cluster.outcomes(4, train_with_missing_rank, 3)
    assert last.error is None
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome.error
        match = rf"rank {rank}: exchange of counts .* because rank 3 did not join .* within 4 s: rank 3 is not waiting"
        assert re.search(match, outcome.error[1]), outcome.error


def wait_in_a_cycle(rank: int, world: int) -> None:
    """Rank 0 waits for 2, 2 for 3, 3 for 1, and 1 for 0."""
    topology = Topology.from_sizes(2, 2, timeout_s=4.0)
    if rank in (0, 3):
        all_gather_rows(topology.ep, torch.ones(1, 1), [1, 1], "gathering")
    else:
        all_reduce(topology.esp, torch.ones(1), operation="adding")


@pytest.mark.slow
def test_cyclic_wait_times_out_on_every_rank(cluster: Cluster) -> None:
    cluster.run(4, nothing)
    start = time.monotonic()
    outcomes = cluster.outcomes(4, wait_in_a_cycle)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error[0] == "RankError"
        match = rf"rank {rank}: (gathering|adding) .* not all ranks joined within 4 s: rank \d waits for"
        assert re.search(match, outcome.error[1]), outcome.error
    assert time.monotonic() - start < SOON_S  # pending operations do not delay it either


def all_reduce_forever(topology: Topology) -> None:
    """All-reduce in a loop: a single sum may complete without a rank that has sent its share."""
    while True:
        all_reduce(topology.world, torch.ones(1), operation="adding")


def stop_while_waiting(rank: int, world: int, culprit: int) -> None:
    """The other ranks wait for it in its own operation, or in a different one."""
    topology = Topology.from_sizes(2, timeout_s=6.0)
    pids = all_gather_object(topology.world, os.getpid())
    board, last = topology.world.board, (culprit + 1) % world
    if rank == last:
        while not board.wait_notes([culprit])[culprit].operation:
            time.sleep(0.01)
        os.kill(pids[culprit], signal.SIGSTOP)
    try:
        if rank == culprit ^ 1:
            all_reduce(topology.ep, torch.ones(1), operation="adding pairs")
        all_reduce_forever(topology)
    finally:
        if rank == last:
            os.kill(pids[culprit], signal.SIGCONT)


@pytest.mark.slow
def test_rank_stopped_while_waiting_is_named(cluster: Cluster) -> None:
    culprit = random.randrange(4)
    text = rf"not all ranks joined within 6 s: .*rank {culprit} was stopped while it waited for adding over the world"
    check(cluster, culprit, text, stop_while_waiting)


def kill_on_another_host(rank: int, world: int, culprit: int) -> None:
    """Processes on another host cannot be checked; living ranks are recognized by renewed notes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host {rank}")
        topology = Topology.from_sizes(4)
        topology.world.board.exit_s = 2 * NOTE_RENEWAL_S
        pids = all_gather_object(topology.world, os.getpid())
        if rank == (culprit + 1) % world:
            while not topology.world.board.wait_notes([culprit])[culprit].operation:
                time.sleep(0.01)
            os.kill(pids[culprit], signal.SIGKILL)
        all_reduce_forever(topology)


@pytest.mark.slow
def test_rank_killed_on_another_host_ends_all_ranks(cluster: Cluster) -> None:
    check(cluster, random.randrange(4), "failed in adding: its connection to rank . broke", kill_on_another_host)


def create_different_sizes(rank: int, world: int, culprit: int) -> None:
    Topology.from_sizes(ep=4 if rank == culprit else 2)


def create_indivisible_sizes(rank: int, world: int) -> None:
    Topology.from_sizes(ep=3)


def miss_topology_creation(rank: int, world: int, culprit: int) -> None:
    """Rank 0 starts after all others wait, so only the culprit is missing."""
    board = Board(dist.distributed_c10d._get_default_store(), rank)
    if rank == culprit:
        assert board.read(wait_s=60.0) is not None
        raise ValueError("overslept")
    if rank == 0:
        for other in range(1, world):
            while other != culprit and not board.wait_notes([other])[other].operation:
                time.sleep(0.01)
    Topology.from_sizes(ep=2, timeout_s=60.0 if rank else 1.0)


def test_topology_creation_errors_name_rank_and_sizes(cluster: Cluster) -> None:
    for outcome in cluster.outcomes(4, create_indivisible_sizes):
        assert outcome.error is not None and outcome.error[0] == "ConfigError"
        assert outcome.error[1].startswith("ep·esp = 3 does not divide the world of 4 ranks")
    for rank, outcome in enumerate(cluster.outcomes(4, create_different_sizes, 2)):
        assert outcome.error is not None and outcome.error[0] == "RankError"
        other = 0 if rank == 2 else 2
        match = rf"rank {rank} has ep=., .* rank {other} has ep=.*Pass the same on every rank"
        assert re.search(match, outcome.error[1]), outcome.error
    match = "making the topology ended because rank 3 did not join making the topology: time-out after 1 s"
    check(cluster, 3, match, miss_topology_creation)


@pytest.mark.parametrize(
    ("waits_for", "is_advised"),
    [
        ("combine over the ep group [0, 1]", False),  # it has skipped or repeated a call
        ("sum of gradients over the dp group [1, 3]", True),  # rank 3 may be slow
        ("", True),  # it is late
        ("dispatch over the ep group [0, 1]", True),  # both wait for data
    ],
)
def test_timeout_error_suggests_longer_timeout_unless_a_call_was_skipped(waits_for: str, is_advised: bool) -> None:
    board: Any = SimpleNamespace(
        rank=0,
        num_calls_by_operation=Counter(),
        wait_notes=lambda ranks: {1: WaitNote(waits_for, 1, 1)},
        final_verdict=lambda: None,
        blame=lambda culprit, operation, text, is_absent: text,
    )
    error = timeout_error(board, [1], "dispatch", "the ep group [0, 1]", 4.0, {})
    assert (TIMEOUT_CURE in str(error)) == is_advised, error
