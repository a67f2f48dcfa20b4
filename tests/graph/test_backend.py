"""Compiled training equals training as it is, over ranks."""

from __future__ import annotations

import copy

import pytest
import torch

from fusedmoe.graph import Backend
from tests.cluster import Cluster
from tests.graph.models import Model, Steady, train


def compiled_and_eager(rank: int, world: int, k: int, **settings: object) -> tuple[float, list[str]]:
    """The largest difference of any loss, gradient or parameter over 5 steps, and the reports."""
    torch._dynamo.reset()
    model = Model(k).double()
    plain = copy.deepcopy(model)
    backend = Backend(costs=Steady(), **settings)  # type: ignore[arg-type]
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    theirs = train(plain, plain, rank)
    worst = max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)
    return worst, [str(report) for report in backend.reports]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_is_what_it_was(cluster: Cluster, world: int, k: int) -> None:
    for worst, reports in cluster.run(world, compiled_and_eager, k):
        assert worst < 1e-10
        assert len(reports) == 2
