"""Compiled training equals training as it is, over ranks."""

from __future__ import annotations

import copy

import pytest
import torch

from fusedmoe.graph import Backend, Report
from tests.cluster import Cluster
from tests.graph.models import Model, Steady, train


def compiled_and_eager(rank: int, world: int, k: int, parts: int) -> tuple[float, list[Report]]:
    """The largest difference of any loss, gradient or parameter over 5 steps, and the reports."""
    torch._dynamo.reset()
    model = Model(k).double()
    plain = copy.deepcopy(model)
    backend = Backend(costs=Steady(), parts=parts, groups=2)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    theirs = train(plain, plain, rank)
    worst = max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)
    return worst, backend.reports


@pytest.mark.parametrize(("world", "k", "parts"), [(1, 2, 4), (2, 1, 4), (4, 2, 2)])
def test_training_is_what_it_was(cluster: Cluster, world: int, k: int, parts: int) -> None:
    found = cluster.run(world, compiled_and_eager, k, parts)
    for worst, (forward, backward) in found:
        assert worst < 1e-10
        assert [one.parts for one in forward.ranges] == [parts, parts]
        assert all(one.all_to_alls == 2 for one in forward.ranges)
        # Each all-to-all of the backward pass but the first has weight gradients beside it.
        assert [bool(one.weights) for one in backward.collectives] == [True] * 4
    assert len({str((forward.order, backward.order)) for _, (forward, backward) in found}) == 1
