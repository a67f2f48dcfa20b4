"""Ranks that call different operations end at once, with an error that names both operations."""

from __future__ import annotations

import random
import re
import time

import pytest
import torch

import fusedmoe
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, all_gather_rows, all_reduce, all_to_all_rows
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.comm.failing import nothing
from tests.marks import slowly

FORM = RowForm(torch.float32, 16, 1, None)


def call_out_of_order(rank: int, world: int, culprit: int, way: str) -> None:
    """One rank's different call could deliver its bytes to the other rank's operation."""
    topology = Topology.from_sizes(2, timeout_s=60.0)
    ep, ones, mine = topology.ep, [1] * world, rank == culprit
    numbers = torch.randint(-(2**62), 2**62, (world, 7))
    if way == "counts" and mine:
        all_to_all_rows(ep, numbers, ones, ones, "an operation of its own")
    elif way == "counts":
        exchange_metadata(make_all_to_all("direct", topology), topology.esp, torch.ones(10, dtype=torch.int64), FORM)
    elif mine:
        all_gather_rows(ep, numbers[:1, :2], ones, "an operation of its own")
    else:
        all_gather_object(ep, "a thing")
    all_reduce(ep, torch.ones(1))


def call_different_operation(rank: int, world: int, culprit: int, way: str) -> None:
    """One rank makes a different call than the other rank, or the same call with other sizes."""
    topology, mine = Topology.from_sizes(2, timeout_s=60.0), rank == culprit
    ep, many = topology.ep, 5000
    if way == "different_all_reduce_size":
        all_reduce(ep, torch.ones(many + mine))
    elif way == "small_and_large_all_reduce":
        all_reduce(ep, torch.ones(many if mine else 1))
    elif way == "different_all_reduce_dtype":
        all_reduce(ep, torch.ones(many, dtype=torch.float64 if mine else torch.float32))
    elif way == "max_instead_of_sum":
        all_reduce(ep, torch.ones(3), "max" if mine else "sum")
    elif way == "different_row_width":
        all_to_all_rows(ep, torch.ones(2 * many, 3 + mine), [many, many], [many, many])
    elif way == "wrong_row_count":
        count = many + mine
        all_to_all_rows(ep, torch.ones(2 * count, 3), [count, count], [count, count])
    elif way == "all_reduce_instead_of_all_gather":
        all_reduce(ep, torch.ones(many)) if mine else all_gather_rows(ep, torch.ones(many, 3), [many, many])
    else:
        layers = [
            MoELayer(16, fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(8), topology=topology) for _ in range(2)
        ]
        if way == "different_expert_count":
            counts = torch.ones(4 + 4 * mine, dtype=torch.int64)
            exchange_metadata(make_all_to_all("direct", topology), topology.esp, counts, FORM)
        if way == "different_layer_order":
            layers = layers[::-1] if mine else layers
        losses = [layer(torch.randn(40 + 50 * mine, 16)).square().mean() for layer in layers]
        if way == "extra_evaluation" and mine:
            with torch.no_grad():
                layers[0](torch.randn(40, 16))
        if way == "missing_backward":
            losses = losses[:0] if mine else losses
        if way == "partial_backward":
            losses = losses[:1] if mine else losses[::-1]
        for loss in losses[::-1] if way == "different_backward_order" and mine else losses:
            loss.backward()
        layers[0](torch.randn(40, 16))


def skip_step(rank: int, world: int, culprit: int) -> None:
    """One rank skips a layer's step and waits for its peer elsewhere, in a group that records its waits."""
    with Topology.from_sizes(2, timeout_s=3.0) as topology:
        layer = MoELayer(16, fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(8), topology=topology)
        for step in range(3):
            if rank != culprit or step != 1:
                layer(torch.randn(40, 16))
        if rank == culprit:
            time.sleep(6.0)


def test_rank_that_skips_a_step_is_named_as_not_joining(cluster: Cluster) -> None:
    culprit = random.randrange(2)
    outcomes = cluster.outcomes(2, skip_step, culprit)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and outcome.error[0] == "RankError", outcomes
        assert f"ended because rank {culprit} did not join exchange of counts: not all ranks" in outcome.error[1], rank


SUMS = [
    "different_all_reduce_size",
    "small_and_large_all_reduce",
    "different_all_reduce_dtype",
    "max_instead_of_sum",
    "all_reduce_instead_of_all_gather",
]
ROWS = ["different_row_width", "wrong_row_count", "different_expert_count", "different_layer_order"]
PASSES = ["extra_evaluation", "missing_backward", "partial_backward", "different_backward_order"]


@pytest.mark.parametrize("way", [SUMS[0], ROWS[0], PASSES[0], *slowly(*SUMS[1:], *ROWS[1:], *PASSES[1:])])
def test_mismatched_operations_raise_on_all_ranks(cluster: Cluster, way: str) -> None:
    """Gloo would abort the process, or return uninitialized memory."""
    culprit = random.randrange(2)
    cluster.run(2, nothing)
    outcomes = cluster.outcomes(2, call_different_operation, culprit, way, timeout_s=45.0)
    texts = [outcome.error[1] if outcome.error else "" for outcome in outcomes]
    assert [outcome.error and outcome.error[0] for outcome in outcomes] == ["RankError"] * 2, outcomes
    match = r" because (rank \d failed in .*: ranks of the ep group .* call different operations: rank 0 .*; rank 1 .*)"
    causes = [re.search(match, text) for text in texts]
    if way == "wrong_row_count":
        causes = [re.search(r" because (rank \d failed in .*: the data it sent to rank .*)", text) for text in texts]
    assert all(causes) and len({cause and cause[1] for cause in causes}) == 1, texts
    if way in ("extra_evaluation", "missing_backward"):
        assert all(f"because rank {culprit} failed" in text for text in texts), texts


@pytest.mark.parametrize("way", ["counts", "objects"])
def test_payload_of_other_operation_is_not_read_as_sizes(cluster: Cluster, way: str) -> None:
    culprit = random.randrange(2)
    cluster.run(2, nothing)
    for rank, outcome in enumerate(cluster.outcomes(2, call_out_of_order, culprit, way, timeout_s=45.0)):
        match = (
            rf"^rank {rank}: .* because rank .* failed in .*: ranks of .* call .*rank {culprit} calls an operation of"
        )
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome.error
        assert re.search(match, outcome.error[1]), outcome.error
