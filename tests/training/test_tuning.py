"""S_p changes between steps, on all ranks alike, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.schedule.simulate import makespan
from fusedmoe.training import plan_step, sync_gradients
from fusedmoe.training.overlap import blocks_costs
from fusedmoe.training.tuning import PieceTuning
from tests.cluster import Cluster
from tests.layers.test_pipeline import L, M, make_blocks
from tests.layers.test_pipeline_plans import COSTS, workload

pytest.importorskip("sklearn")


def tune(rank: int, world: int) -> list[int]:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    blocks = make_blocks("topk", 2, None, topology)
    run = fusedmoe.pipeline(blocks)
    costs = replace(COSTS, lines={**COSTS.lines})
    plan, stream = plan_step(run, topology, "flowmoe", costs, workload(topology, 2), limit=4)
    step = blocks_costs(run, costs, workload(topology, 2), stream)
    tuning = PieceTuning(run, stream, step, plan, samples=4, steps=1)
    sizes, gradients = [], []
    for _ in range(6):
        sizes.append(max(task.size or 0 for task in tuning.plan.inter if task.kind == "gradient-all-reduce"))
        torch.manual_seed(rank)
        stream.open()
        run(torch.randn(4, L, M, dtype=torch.double)).square().sum().backward()
        sync_gradients(run, topology, stream=stream)
        gradients.append([None if p.grad is None else p.grad.clone() for p in run.parameters()])
        run.zero_grad()
        # As simulated, and on one rank longer: the longest counts.
        tuning.note(makespan(tuning.plan, step) * (1 + rank))
    for one, other in zip(gradients[0], gradients[-1], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert tuning.tuner.settled and len(set(sizes)) >= 4, (sizes, tuning.tuner.tried)
    return [tuning.tuner.piece_bytes, *sizes]


def test_sizes_are_tried_and_the_best_is_kept(cluster: Cluster) -> None:
    first, second = cluster.run(2, tune)
    assert first == second
