"""GPipe stages compute the same as the unsplit model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.cluster.gpipe import Stage, run, schedule_of
from bench.cluster.job import measure
from bench.cluster.setting import COMPUTED
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.policies import POLICIES
from tests.cluster import Cluster
from tests.marks import slowly

CONFIG = ModelConfig(
    layers=3, model_dim=16, heads=2, seq_len=6, batch=4, hidden=24, experts=4, k=2, capacity_factor=None
)


def unsplit_model(config: ModelConfig, topology: Topology | None = None) -> Transformer:
    torch.manual_seed(5)
    return Transformer(config, topology, dtype=torch.float64)


def batch(config: ModelConfig, replicas: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shape = (2, replicas * config.batch, config.seq_len)
    tokens_BL, targets_BL = torch.randint(0, 256, shape, generator=generator)
    return tokens_BL, targets_BL


def close(found: nn.Module, right: nn.Module) -> int:
    """Compare parameters with the stage's names; return the number of compared parameters."""
    pairs = list(zip(found.named_parameters(), right.named_parameters(), strict=True))
    for (name, own), (_, its) in pairs:
        assert own.grad is not None and its.grad is not None, name
        torch.testing.assert_close(own.grad, its.grad, rtol=1e-10, atol=1e-10)
    return len(pairs)


def run_two_stages(
    rank: int, world: int, config: ModelConfig, micro_batches: int, aux_weight: float
) -> tuple[float, int]:
    tokens_BL, targets_BL = batch(config)
    right, expected = unsplit_model(config), 0.0
    # The auxiliary loss is per micro-batch; without it the model runs on the full batch.
    parts = micro_batches if aux_weight else 1
    for tokens_bL, targets_bL in zip(tokens_BL.chunk(parts), targets_BL.chunk(parts), strict=True):
        loss = right(tokens_bL, targets_bL)
        total = (loss.nats + aux_weight * loss.aux) / parts
        total.backward()
        expected += float(total.detach())
    stage, last = Stage(unsplit_model(config), rank, world), rank + 1 == world
    schedule = schedule_of(stage, rank, world, config.batch, micro_batches, aux_weight, None)
    for _ in range(2):  # a schedule is reusable
        stage.zero_grad()
        found = run(schedule, tokens_BL, targets_BL, first=rank == 0, last=last)
        assert (found is not None) == last
        assert found is None or found == pytest.approx(expected, abs=1e-10)
    return float(rank), close(stage, Stage(right, rank, world))


@pytest.mark.parametrize(("micro_batches", "aux_weight", "positions"), [(4, 0.1, "rope"), *slowly((2, 0.0, "learned"))])
def test_two_pipeline_stages_equal_unsplit_model(
    cluster: Cluster, micro_batches: int, aux_weight: float, positions: str
) -> None:
    config = replace(CONFIG, positions=positions)
    (_, first), (_, second) = cluster.run(2, run_two_stages, config, micro_batches, aux_weight)
    assert first + second == len(list(unsplit_model(config).parameters()))


def run_stages_of_two_ranks(rank: int, world: int, config: ModelConfig) -> int:
    """A stage's experts are spread over its two ranks, each with its own batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    number, replica = mesh["pp"].get_local_rank(), mesh["ep"].get_local_rank()
    tokens_BL, targets_BL = batch(config, 2)
    right = unsplit_model(config)
    loss = right(tokens_BL, targets_BL).nats
    loss.backward()
    with Topology.from_mesh(mesh, ep="ep") as topology:
        stage = Stage(unsplit_model(config, topology), number, 2)
        schedule = schedule_of(stage, number, 2, config.batch, 2, 0.0, mesh["pp"].get_group())
        own = slice(replica * config.batch, (replica + 1) * config.batch)
        found = run(schedule, tokens_BL[own], targets_BL[own], first=number == 0, last=number == 1)
        if found is not None:
            total = all_reduce(topology.ep, torch.tensor(found, dtype=torch.float64)) / 2
            torch.testing.assert_close(total, loss.detach(), rtol=1e-10, atol=1e-10)
        compared = 0
        for (name, own_p), (_, its) in zip(
            stage.named_parameters(), Stage(right, number, 2).named_parameters(), strict=True
        ):
            assert own_p.grad is not None and its.grad is not None, name
            expected = its.grad
            if own_p.shape != its.shape:  # two of four experts, with the rows of both ranks
                expected, gradient = its.grad.chunk(2)[replica], own_p.grad / 2
            else:
                gradient = all_reduce(topology.ep, own_p.grad) / 2
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
            compared += own_p.shape != its.shape
        dist.barrier()
    return compared


@pytest.mark.slow
def test_expert_parallel_stages_equal_unsplit_model(cluster: Cluster) -> None:
    assert cluster.run(4, run_stages_of_two_ranks, CONFIG) == [2, 2, 4, 4]  # one block, and two


def measure_rows(rank: int, world: int) -> dict[str, Any]:
    setting = replace(COMPUTED, layers=2, S=2048, M=16, H=32)
    topology = Topology.from_sizes(ep=2, ranks_per_node=1, timeout_s=30)
    costs = CostModel({name: Line(1e-5, 1e-9) for name in LINES})
    return measure(setting, topology, 1, costs)


@pytest.mark.slow
def test_gpipe_rows_are_reported_with_schedules(cluster: Cluster) -> None:
    found = cluster.run(2, measure_rows)[0]
    rows = found["rows"]
    assert {"off", *POLICIES, "auto", "gpipe, 4 micro-batches", "gpipe, 8 micro-batches"} == rows.keys()
    assert all(row["median_s"] > 0 and row["over_sequential"] > 0 for row in rows.values())
    assert "plan" not in rows["gpipe, 4 micro-batches"] and rows["fsmoe"]["predicted_s"] > 0
    assert found["auto"]["steps_tried"] > 0
