"""An input refused by all ranks of an exchange leaves no error behind: the next batch works."""

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
from fusedmoe.threads import POLL_S
from tests.cluster import Cluster
from tests.comm.failing import M, check, linear, make
from tests.marks import slowly


def reject_batches_on_one_rank(rank: int, world: int, culprit: int, ep: int, esp: int) -> None:
    """Batches that one rank refuses, and every rank catches, do not affect later batches."""
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
        time.sleep(3 * POLL_S)  # the other ranks read the board
    for later in (layer, make(Topology.from_sizes(ep, esp, esp), expert)):
        assert later(good).isfinite().all()
    assert topology.world.board.read() is None


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep", "esp"), [(2, 2, 1), *slowly((2, 1, 2), (4, 2, 2))])
def test_rejection_raised_on_all_ranks_leaves_no_error(cluster: Cluster, world: int, ep: int, esp: int) -> None:
    cluster.run(world, reject_batches_on_one_rank, random.randrange(world), ep, esp)


def reject_batches_without_exchange(rank: int, world: int, culprit: int) -> None:
    layer = make(Topology.from_sizes(mp=2))
    for width, text in ((7, r"shape \[5, 7\]"), (M, f"equal tokens .* on rank {culprit}"), (6, r"shape \[5, 6\]")):
        batch = torch.ones(6 if width == M else 5, width) if rank == culprit else torch.ones(5, M)
        others = "" if rank == culprit or width == M else f"ended because rank {culprit} failed in the check of .*: "
        with pytest.raises(RankError, match=f"^rank {rank}: {others}.*{text}"):
            layer(batch)
        assert layer(torch.ones(5, M)).isfinite().all()
    assert layer.topology.world.board.read() is None


def test_rejection_without_exchange_leaves_no_error(cluster: Cluster) -> None:
    cluster.run(2, reject_batches_without_exchange, random.randrange(2))


def reject_on_one_replica(rank: int, world: int, culprit: int, timeout_s: float, stays: bool, on_device: bool) -> None:
    """The other replica gets the error while waiting for gradients: after its time-out, or once the first has ended."""
    topology = Topology.from_sizes(2, timeout_s=timeout_s)
    layer = make(topology)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if on_device:  # the exchange reports non-finite logits, not an earlier check
                patch.setattr(input_checks, "uses_triton", lambda tensor: True)
            layer(torch.full((5, M), math.nan if rank == culprit else 1.0))
    except RankError:
        if stays:  # until the other replica has timed out
            assert topology.world.board.read(wait_s=60.0) is not None
        raise
    all_reduce(topology.dp, torch.ones(1))


@pytest.mark.parametrize("on_device", [True, *slowly(False)])
@pytest.mark.parametrize(("timeout_s", "stays"), [(300.0, False), *slowly((4.0, True))])
def test_rejection_on_one_replica_is_raised_on_others(
    cluster: Cluster, timeout_s: float, stays: bool, on_device: bool
) -> None:
    text = f"rank 2 failed in the check of .*: {'' if on_device else '5 of 5 '}tokens with router logits that are NaN"
    check(cluster, 2, text, reject_on_one_replica, timeout_s, stays, on_device)


def skip_batch_on_all_replicas(rank: int, world: int, culprit: int) -> None:
    """One replica refuses a batch; all agree to skip it, after any delay."""
    topology = Topology.from_sizes(2)
    layer = make(topology)
    for bad in (True, False, True, False):
        refused = torch.zeros(1)
        try:
            layer(torch.full((5, M), math.nan if bad and rank == culprit else 1.0))
        except RankError:
            refused += 1
            time.sleep(2 * POLL_S)  # the other ranks read the board
        assert all_reduce(topology.world, refused) == 2 * bad
    assert topology.world.board.final_verdict() is None


@pytest.mark.slow
def test_batch_skipped_by_all_replicas_leaves_no_error(cluster: Cluster) -> None:
    cluster.run(4, skip_batch_on_all_replicas, random.randrange(4))
