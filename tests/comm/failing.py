"""Layers with failing ranks, and a check that all other ranks end soon with an error that names the culprit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fusedmoe
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import Custom
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster

M = 8
# An error takes seconds, or ten times that on a busy machine; waiting for Gloo's time-out takes a minute.
SOON_S = 40.0


def nothing(rank: int, world: int) -> None:
    pass


def check(cluster: Cluster, culprit: int, match: str, function: Callable[..., None], *args: Any) -> list[str]:
    """Require that 3 of 4 ranks soon raise a RankError with this text that names the culprit; return the texts."""
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
            assert f"rank {rank}: " in text, (rank, text)
            assert re.search(f"rank {culprit} (failed in|did not join) ", text), (rank, text)
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
