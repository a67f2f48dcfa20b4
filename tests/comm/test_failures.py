"""When a rank fails, all others end soon with an error that names it."""

from __future__ import annotations

import atexit
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, all_gather_rows, all_reduce, all_to_all_rows
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.failure import blame
from fusedmoe.comm.failure.board import RENEWED_S, Board, tell_others_of_uncaught
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.layers.expert_networks import Custom
from fusedmoe.layers.moe import MoELayer
from fusedmoe.threads import LOOK_S
from fusedmoe.training.data_parallel import distributed_data_parallel
from tests.cluster import Cluster

M = 8
SOON_S = 15.0


def nothing(rank: int, world: int) -> None:
    pass


def check(cluster: Cluster, culprit: int, match: str, function: Callable[..., None], *args: Any) -> list[str]:
    """Of 4 ranks all but the culprit must end soon, with a RankError of this text that names it; returns the texts."""
    cluster.run(4, nothing)  # starting ranks takes a while
    start = time.monotonic()
    outcomes = cluster.outcomes(4, function, culprit, *args)
    seconds = time.monotonic() - start
    texts = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, f"rank {rank} did not fail"
        kind, text, _ = outcome.error
        texts.append(text)
        if rank != culprit:
            assert kind == "RankError", (rank, outcome.error)
            assert f"rank {rank}: " in text and f"rank {culprit} failed in" in text, (rank, text)
            assert re.search(match, text), (rank, text)
    assert seconds < SOON_S, seconds
    return texts


def linear(dim: int) -> nn.Module:
    return nn.Linear(dim, dim)


def make(topology: Topology, expert: Callable[..., nn.Module] = linear, experts: int = 8) -> MoELayer:
    return MoELayer(M, fusedmoe.gates.TopK(experts=experts, k=2), Custom(expert), topology=topology)


def train(layer: MoELayer, steps: int = 100_000) -> None:
    for _ in range(steps):
        y = layer(torch.randn(5, M, requires_grad=True))
        y.sum().backward()
        all_reduce(layer.topology.world, torch.ones(3))


def in_wrapper(rank: int, world: int, culprit: int, calls: int) -> None:
    """Killed before the wrapper compares copies, or before it makes its buckets anew in its second forward pass."""
    layer = make(topology := Topology.from_sizes(4))
    for call in range(3):
        if rank == culprit and call == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        if not call:
            wrapped = distributed_data_parallel(layer, topology)
        wrapped(torch.randn(5, M)).sum().backward()


@pytest.mark.parametrize(
    ("calls", "match"),
    # Whichever rank asks first names the operation for all: one may have been past the buckets.
    [(0, "comparing the copies"), (1, "agreeing on gradient buckets|exchange of counts")],
)
def test_a_rank_that_ends_before_the_wrapper_of_pytorch(cluster: Cluster, calls: int, match: str) -> None:
    check(cluster, random.randrange(4), match, in_wrapper, calls)


def stops_before_the_wrapper(rank: int, world: int, culprit: int) -> None:
    """PyTorch's own wait, in which nobody looks at the board."""
    layer = make(topology := Topology.from_sizes(4, timeout_s=2.0))
    pids = all_gather_object(topology.world, os.getpid())
    try:
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        distributed_data_parallel(layer, topology)
    finally:
        if rank == (culprit + 1) % world:
            os.kill(pids[culprit], signal.SIGCONT)


def test_a_rank_that_stops_before_the_wrapper_of_pytorch(cluster: Cluster) -> None:
    texts = check(cluster, culprit := random.randrange(4), "comparing the copies", stops_before_the_wrapper)
    assert all("it did not come" in text for rank, text in enumerate(texts) if rank != culprit), texts


def in_reducer(rank: int, world: int, culprit: int, way: str) -> None:
    """In the backward pass of a model whose gradients PyTorch's wrapper alone reduces."""
    topology = Topology.from_sizes(1, timeout_s=8.0)
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


@pytest.mark.parametrize("way", ["killed", "raises"])
def test_a_rank_that_ends_before_the_reducer_of_pytorch(cluster: Cluster, way: str) -> None:
    said = {"killed": "its process ended", "raises": "ValueError: this model cannot go back"}
    check(cluster, random.randrange(4), f"backward pass of .*{said[way]}", in_reducer, way)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("this expert cannot go back")


class Broken(nn.Module):
    """An expert that fails the third time, in forward or in backward."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.calls, self.backward = 0, backward
        self.weight = nn.Parameter(torch.ones(M))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            if not self.backward:
                raise ValueError("this expert does not feel well")
            x = Fails.apply(x)
        return x * self.weight


def in_forward(rank: int, world: int, culprit: int) -> None:
    train(make(Topology.from_sizes(4), lambda dim: Broken(False) if rank == culprit else linear(dim)))


def in_backward(rank: int, world: int, culprit: int) -> None:
    topology = Topology.from_sizes(2)
    layer = make(topology, lambda dim: Broken(True) if rank == culprit else linear(dim))
    with topology.guard("the training step"):
        train(layer)


def in_guarded_code(rank: int, world: int, culprit: int) -> None:
    topology = Topology.from_sizes(2)
    layer = make(topology)
    with topology.guard("loading data"):
        train(layer, 3)
        if rank == culprit:
            raise FileNotFoundError("no such shard: 17")
        train(layer)


@pytest.mark.slow
def test_experts_that_raise(cluster: Cluster) -> None:
    texts = check(cluster, 1, "failed in MoELayer.forward: ValueError: this expert does not feel well", in_forward)
    assert texts[1] == "this expert does not feel well"
    texts = check(cluster, 2, "failed in the training step: ValueError: this expert cannot go back", in_backward)
    assert texts[2] == "this expert cannot go back"


def test_guarded_code_that_raises(cluster: Cluster) -> None:
    check(cluster, 3, "rank 3 failed in loading data: FileNotFoundError: no such shard: 17", in_guarded_code)


def killed(rank: int, world: int, culprit: int, ep: int, after_s: float) -> None:
    layer = make(Topology.from_sizes(ep))
    train(layer, 3)
    if rank == culprit:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(layer)


@pytest.mark.parametrize("ep", [4, 2])
def test_killed_in_the_middle_of_an_exchange(cluster: Cluster, ep: int) -> None:
    after_s = random.uniform(0.0, 0.3)
    culprit = random.randrange(4)
    check(cluster, culprit, r"its process ended \(an error, killed, or out of memory\)", killed, ep, after_s)


def never_comes(rank: int, world: int, culprit: int) -> None:
    # Rank 0 gives up first. It waits for rank 1, which waits for rank 3.
    topology = Topology.from_sizes(2, 2, timeout_s=1.5 if rank == 0 else 3.0)
    layer = make(topology, lambda dim, shard, shards: linear(dim))
    train(layer, 2)
    if rank == culprit:
        time.sleep(60)
    train(layer, 1)


@pytest.mark.slow
def test_a_rank_that_never_comes(cluster: Cluster) -> None:
    cluster.run(4, nothing)
    *outcomes, last = cluster.outcomes(4, never_comes, 3, timeout_s=10.0)
    assert last.error is not None and last.error[0] == "TimeoutError"
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome.error
        match = rf"rank {rank}: exchange of counts .* because rank 3 failed .* within 2 s: rank 3 is not there"
        assert re.search(match, outcome.error[1]), outcome.error


def in_a_circle(rank: int, world: int) -> None:
    """Rank 0 waits for 2, 2 for 3, 3 for 1, and 1 for 0."""
    topology = Topology.from_sizes(2, 2, timeout_s=1.0)
    if rank in (0, 3):
        all_gather_rows(topology.ep, torch.ones(1, 1), [1, 1], "gathering")
    else:
        all_reduce(topology.esp, torch.ones(1), operation="adding")


def test_ranks_that_wait_for_each_other(cluster: Cluster) -> None:
    cluster.run(4, nothing)
    start = time.monotonic()
    outcomes = cluster.outcomes(4, in_a_circle)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error[0] == "RankError"
        match = rf"rank {rank}: (gathering|adding) .* not all ranks came within 1 s: rank \d waits for"
        assert re.search(match, outcome.error[1]), outcome.error
    assert time.monotonic() - start < SOON_S  # what they began does not keep them either


def out_of_order(rank: int, world: int, culprit: int, way: str) -> None:
    """Where one rank calls another operation its bytes could arrive as those of the operation that the other called."""
    topology = Topology.from_sizes(2, timeout_s=2.0)
    ep, ones, mine = topology.ep, [1] * world, rank == culprit
    numbers = torch.randint(-(2**62), 2**62, (world, 7))
    if way == "counts" and mine:
        all_to_all_rows(ep, numbers, ones, ones, "an operation of its own")
    elif way == "counts":
        Exchange(make_all_to_all("direct", topology), topology.esp, torch.ones(10, dtype=torch.int64), torch.float32)
    elif mine:
        all_gather_rows(ep, numbers[:1, :2], ones, "an operation of its own")
    else:
        all_gather_object(ep, "a thing")
    all_reduce(ep, torch.ones(1))


def other_call(rank: int, world: int, culprit: int, way: str) -> None:
    """What one rank calls at a place where the other calls something else, or the same of other sizes."""
    topology, mine = Topology.from_sizes(2, timeout_s=20.0), rank == culprit
    ep, many = topology.ep, 5000
    if way == "sum of another size":
        all_reduce(ep, torch.ones(many + mine))
    elif way == "small and large sum":
        all_reduce(ep, torch.ones(many if mine else 1))
    elif way == "sum of another dtype":
        all_reduce(ep, torch.ones(many, dtype=torch.float64 if mine else torch.float32))
    elif way == "maximum for a sum":
        all_reduce(ep, torch.ones(3), "max" if mine else "sum")
    elif way == "rows of another width":
        all_to_all_rows(ep, torch.ones(2 * many, 3 + mine), [many, many], [many, many])
    elif way == "more rows than told":
        count = many + mine
        all_to_all_rows(ep, torch.ones(2 * count, 3), [count, count], [count, count])
    elif way == "sum for rows":
        all_reduce(ep, torch.ones(many)) if mine else all_gather_rows(ep, torch.ones(many, 3), [many, many])
    else:
        layers = [
            MoELayer(16, fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(8), topology=topology) for _ in range(2)
        ]
        if way == "other experts":
            counts = torch.ones(4 + 4 * mine, dtype=torch.int64)
            Exchange(make_all_to_all("direct", topology), topology.esp, counts, torch.float32)
        if way == "other order of layers":
            layers = layers[::-1] if mine else layers
        losses = [layer(torch.randn(40 + 50 * mine, 16)).square().mean() for layer in layers]
        if way == "an evaluation" and mine:
            with torch.no_grad():
                layers[0](torch.randn(40, 16))
        if way == "no backward":
            losses = losses[:0] if mine else losses
        if way == "part of the backward":
            losses = losses[:1] if mine else losses[::-1]
        for loss in losses[::-1] if way == "other order of backwards" and mine else losses:
            loss.backward()
        layers[0](torch.randn(40, 16))


SUMS = ["sum of another size", "small and large sum", "sum of another dtype", "maximum for a sum", "sum for rows"]
ROWS = ["rows of another width", "more rows than told", "other experts", "other order of layers"]
PASSES = ["an evaluation", "no backward", "part of the backward", "other order of backwards"]


@pytest.mark.parametrize("way", [*SUMS, *ROWS, *PASSES])
def test_other_calls_end_all_ranks_at_once(cluster: Cluster, way: str) -> None:
    """Gloo would end a process, or give it memory that nobody has written."""
    culprit = random.randrange(2)
    cluster.run(2, nothing)
    outcomes = cluster.outcomes(2, other_call, culprit, way, timeout_s=15.0)
    texts = [outcome.error[1] if outcome.error else "" for outcome in outcomes]
    assert [outcome.error and outcome.error[0] for outcome in outcomes] == ["RankError"] * 2, outcomes
    match = r" because (rank \d failed in .*: ranks of the ep group .* call different operations: rank 0 .*; rank 1 .*)"
    causes = [re.search(match, text) for text in texts]
    if way == "more rows than told":
        causes = [re.search(r" because (rank \d failed in .*: what it sent to rank .*)", text) for text in texts]
    assert all(causes) and len({cause and cause[1] for cause in causes}) == 1, texts
    if way in ("an evaluation", "no backward"):
        assert all(f"because rank {culprit} failed" in text for text in texts), texts


@pytest.mark.parametrize("way", ["counts", "objects"])
def test_bytes_of_another_operation_are_not_taken_for_sizes(cluster: Cluster, way: str) -> None:
    culprit = random.randrange(2)
    cluster.run(2, nothing)
    for rank, outcome in enumerate(cluster.outcomes(2, out_of_order, culprit, way)):
        match = (
            rf"^rank {rank}: .* because rank .* failed in .*: ranks of .* call .*rank {culprit} calls an operation of"
        )
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome.error
        assert re.search(match, outcome.error[1]), outcome.error


def add_on(topology: Topology) -> None:
    """A single sum may not need a rank any more that has sent its share."""
    while True:
        all_reduce(topology.world, torch.ones(1), operation="adding")


def stops_while_it_waits(rank: int, world: int, culprit: int) -> None:
    """The others wait for it in what it waited for itself, or in something else."""
    topology = Topology.from_sizes(2, timeout_s=2.0)
    pids = all_gather_object(topology.world, os.getpid())
    board, last = topology.world.board, (culprit + 1) % world
    if rank == last:
        while not board.waiting([culprit])[culprit].operation:
            time.sleep(0.01)
        os.kill(pids[culprit], signal.SIGSTOP)
    try:
        if rank == culprit ^ 1:
            all_reduce(topology.ep, torch.ones(1), operation="adding pairs")
        add_on(topology)
    finally:
        if rank == last:
            os.kill(pids[culprit], signal.SIGCONT)


def test_a_rank_that_stops_while_it_waits(cluster: Cluster) -> None:
    culprit = random.randrange(4)
    text = rf"not all ranks came within 2 s: .*rank {culprit} was stopped while it waited for adding over the world"
    check(cluster, culprit, text, stops_while_it_waits)


def killed_on_another_host(rank: int, world: int, culprit: int) -> None:
    """Nobody there can be asked for processes; who waits on has been heard of since."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host {rank}")
        topology = Topology.from_sizes(4)
        topology.world.board.exit_s = 2 * RENEWED_S
        pids = all_gather_object(topology.world, os.getpid())
        if rank == (culprit + 1) % world:
            while not topology.world.board.waiting([culprit])[culprit].operation:
                time.sleep(0.01)
            os.kill(pids[culprit], signal.SIGKILL)
        add_on(topology)


def test_a_rank_that_ends_on_another_host_while_it_waits(cluster: Cluster) -> None:
    check(cluster, random.randrange(4), "failed in adding: its connection to rank . broke", killed_on_another_host)


def different_sizes(rank: int, world: int, culprit: int) -> None:
    Topology.from_sizes(ep=4 if rank == culprit else 2)


def does_not_fit(rank: int, world: int) -> None:
    Topology.from_sizes(ep=3)


def missing_at_the_start(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(3)
        raise ValueError("overslept")
    Topology.from_sizes(ep=2, timeout_s=1.0)


def test_topologies(cluster: Cluster) -> None:
    for outcome in cluster.outcomes(4, does_not_fit):
        assert outcome.error is not None and outcome.error[0] == "ConfigError"
        assert outcome.error[1].startswith("ep·esp = 3 does not divide the world of 4 ranks")
    for rank, outcome in enumerate(cluster.outcomes(4, different_sizes, 2)):
        assert outcome.error is not None and outcome.error[0] == "RankError"
        other = 0 if rank == 2 else 2
        match = rf"rank {rank} has ep=., .* rank {other} has ep=.*Pass the same on every rank"
        assert re.search(match, outcome.error[1]), outcome.error
    check(cluster, 3, "making the topology ended because .* did not come within 1 s", missing_at_the_start)


def goes_on(rank: int, world: int, culprit: int, ep: int, esp: int) -> None:
    """Batches that one rank refuses, and that every rank catches, change nothing about those that follow."""
    topology = Topology.from_sizes(ep, esp, esp)
    expert = linear if esp == 1 else lambda dim, shard, shards: linear(dim)
    layer = make(topology, expert)
    good = torch.ones(5, M)
    for batch, text in ((good[:, 1:], r"shape \[5, 7\]"), (good * math.nan, "NaN"), (good[:, 2:], r"shape \[5, 6\]")):
        others = "" if rank == culprit else f"ended because rank {culprit} failed in the check of the layer's input: "
        with pytest.raises(RankError, match=f"^rank {rank}: {others}.*{text}"):
            layer(batch if rank == culprit else good)
        assert layer(good).shape == good.shape
    if rank == culprit:
        time.sleep(3 * LOOK_S)  # the others look at the board
    for later in (layer, make(Topology.from_sizes(ep, esp, esp), expert)):
        assert later(good).isfinite().all()
    assert topology.world.board.read() is None


@pytest.mark.parametrize(("world", "ep", "esp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_what_all_have_raised_is_over(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    cluster.run(world, goes_on, random.randrange(world), ep, esp)


def without_an_exchange(rank: int, world: int, culprit: int) -> None:
    layer = make(Topology.from_sizes(mp=2))
    for width, text in ((7, r"shape \[5, 7\]"), (M, f"equal tokens .* on rank {culprit}"), (6, r"shape \[5, 6\]")):
        batch = torch.ones(6 if width == M else 5, width) if rank == culprit else torch.ones(5, M)
        others = "" if rank == culprit or width == M else f"ended because rank {culprit} failed in the check of .*: "
        with pytest.raises(RankError, match=f"^rank {rank}: {others}.*{text}"):
            layer(batch)
        assert layer(torch.ones(5, M)).isfinite().all()
    assert layer.topology.world.board.read() is None


def test_what_all_have_raised_where_nothing_is_exchanged(cluster: Cluster) -> None:
    cluster.run(2, without_an_exchange, random.randrange(2))


def refused_by_one_replica(rank: int, world: int, culprit: int, timeout_s: float, away_s: float) -> None:
    """The other replica hears of it where it waits for gradients: in vain, or until the first has ended."""
    topology = Topology.from_sizes(2, timeout_s=timeout_s)
    layer = make(topology)
    try:
        layer(torch.full((5, M), math.nan if rank == culprit else 1.0))
    except RankError:
        time.sleep(away_s)
        raise
    all_reduce(topology.dp, torch.ones(1))


@pytest.mark.parametrize(("timeout_s", "away_s"), [(300.0, 0.0), (1.0, 3.0)])
def test_what_some_have_not_heard_is_told_to_them(cluster: Cluster, timeout_s: float, away_s: float) -> None:
    text = "rank 2 failed in the check of .*: 40 of 40 router logits are NaN"
    check(cluster, 2, text, refused_by_one_replica, timeout_s, away_s)


def skips_on_all(rank: int, world: int, culprit: int) -> None:
    """A batch that one replica refuses; all agree to go on without it, as slowly as they like."""
    topology = Topology.from_sizes(2)
    layer = make(topology)
    for bad in (True, False, True, False):
        refused = torch.zeros(1)
        try:
            layer(torch.full((5, M), math.nan if bad and rank == culprit else 1.0))
        except RankError:
            refused += 1
            time.sleep(2 * LOOK_S)  # the others look at the board
        assert all_reduce(topology.world, refused) == 2 * bad
    assert topology.world.board.explain() is None


def test_a_refusal_of_one_replica_that_all_skip_is_over(cluster: Cluster) -> None:
    cluster.run(4, skips_on_all, random.randrange(4))


def lost_store(*_: object) -> None:
    raise torch.distributed.DistError("the store went down")


def test_what_nobody_catches_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda _: None)
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    boards = [Board(torch.distributed.HashStore(), rank) for rank in (3, 4)]
    for board in boards:
        tell_others_of_uncaught(board)
    hook, error = sys.excepthook, ValueError("lost")
    monkeypatch.setattr(boards[0], "post_own", lost_store)
    hook(ValueError, error, None)
    assert seen == [error], "the traceback is printed as before, once"
    assert boards[0].read() is None
    assert str(boards[1].read()) == "rank 4 failed in the program: ValueError: lost"
    del board, boards
    hook(ValueError, error, None)
    assert seen == [error, error]


def test_the_store_stays_until_the_others_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds no store, and has not looked at the board, would name its host instead of the rank at fault."""
    store = torch.distributed.HashStore()
    host, culprit, other = (Board(store, rank) for rank in range(3))
    with ThreadPoolExecutor(3) as pool:  # the ranks
        for ranks in (host, culprit, other):
            pool.submit(ranks.meet, range(3), None, 10.0)
    start = time.monotonic()
    host.linger(start + 100.0)
    assert time.monotonic() - start < 50, "nothing has happened"
    culprit.post_own("the program", "it failed")
    assert host.read() is not None
    start = time.monotonic()
    host.linger(start + 0.2)
    assert time.monotonic() - start >= 0.2, "one of them does not know yet"
    with ThreadPoolExecutor(1) as pool:
        lingers = pool.submit(host.linger, time.monotonic() + 100.0)
        assert not lingers.done() and other.read() is not None
        lingers.result(50)
    for board in (culprit, other):  # nobody else hosts it
        board.linger(time.monotonic() + 100.0)
    assert time.monotonic() - start < 50


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Lonely:
    """A board whose store went when `until_s` had come; no process has ended."""

    exit_s = 10.0
    rank = 1

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock, self._until_s = clock, until_s

    @property
    def cut_off(self) -> bool:
        return self._clock.now_s >= self._until_s

    def blame(self, rank: int, operation: str, message: str) -> str:
        return "rank 0 failed in hosting the job's store" if self.cut_off else f"rank {rank} failed"

    def explain(self) -> None: ...

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        return []

    def waits(self, what: str, ranks: Any) -> None: ...

    def waiting(self, ranks: Any) -> dict[int, Any]:
        return {}


def test_nobody_is_waited_for_whose_word_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hosted the store has left the job, but its process goes on."""
    for until_s, seconds in ((0.0, 1.0), (2.0, 3.0), (1000.0, 10.0)):
        clock = Clock()
        monkeypatch.setattr(blame, "time", clock)
        board: Any = Lonely(clock, until_s)
        text = str(blame.lost(board, (0, 1), "adding", "the world group", "connection closed"))
        assert ("hosting the job's store" in text) == (until_s < 1000)
        assert abs(clock.now_s - seconds) < 0.1


SCRIPT = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from fusedmoe.comm.topology import Topology
from tests.comm.test_failures import make, train
rank, culprit, way, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
layer = make(Topology.from_sizes(3, timeout_s=4.0 if way == "stopped" else 300.0), experts=6)
train(layer, 3)
print("trained", flush=True)
if rank == culprit and way in ("killed", "stopped"):
    number = signal.SIGKILL if way == "killed" else signal.SIGSTOP
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    train(layer)
if rank == culprit and way == "stays":  # the interpreter waits for this thread
    threading.Thread(target=threading.Event().wait, args=(45,)).start()
if rank == culprit:
    raise ValueError("outside of any guard")
train(layer)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "culprit, way",
    [(1, "stays"), (0, "stays"), (1, "raises"), (0, "raises"), (0, "killed"), (0, "stopped"), (1, "stopped")],
)
def test_processes_that_end(culprit: int, way: str) -> None:
    """Processes of their own, as a launcher starts them; rank 0 hosts the store, which goes down, or stops, with it.

    They end although Gloo would have them wait for a rank that lives and owes them data.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(culprit), way, str(port)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "trained\n"
        start = time.monotonic()
        lives = way in ("stays", "stopped")
        errors = [
            "" if lives and rank == culprit else process.communicate(timeout=60)[1]
            for rank, process in enumerate(ranks)
        ]
        assert time.monotonic() - start < SOON_S
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, text in enumerate(errors):
        if rank != culprit:
            assert ranks[rank].returncode == 1
            last = text.strip().splitlines()[-1]
            assert f"RankError: rank {rank}: " in last and f"rank {culprit} failed in" in last, text
            gone = "its process ended (an error, killed, or out of memory); see its log" in last
            told = "failed in the program: ValueError: outside of any guard" in last
            missed = "no answer for" in last if culprit == 0 else "not all ranks came within 4 s" in last
            good = {"stays": told, "raises": told or gone, "killed": gone, "stopped": missed}
            assert good[way], text
    # PyTorch names what it shares by process.
    left = [name for name in os.listdir("/dev/shm") if any(f"_{process.pid}_" in name for process in ranks)]
    assert not left
