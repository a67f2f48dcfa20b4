"""Ranks that call different operations end at once, with an error that names both."""

from __future__ import annotations

import random
import re

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


def out_of_order(rank: int, world: int, culprit: int, way: str) -> None:
    """Where one rank calls another operation its bytes could arrive as those of the operation that the other called."""
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


def other_call(rank: int, world: int, culprit: int, way: str) -> None:
    """What one rank calls at a place where the other calls something else, or the same of other sizes."""
    topology, mine = Topology.from_sizes(2, timeout_s=60.0), rank == culprit
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
            exchange_metadata(make_all_to_all("direct", topology), topology.esp, counts, FORM)
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


@pytest.mark.parametrize("way", [SUMS[0], ROWS[0], PASSES[0], *slowly(*SUMS[1:], *ROWS[1:], *PASSES[1:])])
def test_other_calls_end_all_ranks_at_once(cluster: Cluster, way: str) -> None:
    """Gloo would end a process, or give it memory that nobody has written."""
    culprit = random.randrange(2)
    cluster.run(2, nothing)
    outcomes = cluster.outcomes(2, other_call, culprit, way, timeout_s=45.0)
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
    for rank, outcome in enumerate(cluster.outcomes(2, out_of_order, culprit, way, timeout_s=45.0)):
        match = (
            rf"^rank {rank}: .* because rank .* failed in .*: ranks of .* call .*rank {culprit} calls an operation of"
        )
        assert outcome.error is not None and outcome.error[0] == "RankError", outcome.error
        assert re.search(match, outcome.error[1]), outcome.error
