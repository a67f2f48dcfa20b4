"""A refusal that all ranks of an exchange have raised is over: the next batch goes on."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.layers import input_checks
from fusedmoe.threads import LOOK_S
from tests.cluster import Cluster
from tests.comm.failing import M, check, linear, make
from tests.marks import slowly


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


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), [(2, 2, 1), *slowly((2, 1, 2), (4, 2, 2))])
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


def refused_by_one_replica(rank: int, world: int, culprit: int, timeout_s: float, stays: bool, on_device: bool) -> None:
    """The other replica hears of it where it waits for gradients: in vain, or until the first has ended."""
    topology = Topology.from_sizes(2, timeout_s=timeout_s)
    layer = make(topology)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if on_device:  # where the exchange tells of logits, and not the rank before it
                patch.setattr(input_checks, "uses_triton", lambda tensor: True)
            layer(torch.full((5, M), math.nan if rank == culprit else 1.0))
    except RankError:
        if stays:  # until the other has waited in vain
            assert topology.world.board.read(wait_s=60.0) is not None
        raise
    all_reduce(topology.dp, torch.ones(1))


@pytest.mark.parametrize("on_device", [True, *slowly(False)])
@pytest.mark.parametrize(("timeout_s", "stays"), [(300.0, False), *slowly((4.0, True))])
def test_what_some_have_not_heard_is_told_to_them(
    cluster: Cluster, timeout_s: float, stays: bool, on_device: bool
) -> None:
    text = f"rank 2 failed in the check of .*: {'' if on_device else '5 of 5 '}tokens with router logits that are NaN"
    check(cluster, 2, text, refused_by_one_replica, timeout_s, stays, on_device)


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


@pytest.mark.slow
def test_a_refusal_of_one_replica_that_all_skip_is_over(cluster: Cluster) -> None:
    cluster.run(4, skips_on_all, random.randrange(4))
