"""Programs of one-sided puts, which kernels issue in Triton's interpreter over shared memory."""

from __future__ import annotations

from pathlib import Path

import torch

import fusedmoe
from fusedmoe import experts, gates

from .programs_layers import batch, step, topology_of
from .programs_systems import placed as placed_by
from .record import Record, public


def fused(
    record: Record, rank: int, world: int, scratch: Path, degrees: tuple[int, int], row_factor: float | None
) -> None:
    with topology_of({"ep": 2}) as topology:
        schedule = fusedmoe.Schedule("fused", degrees=degrees, row_factor=row_factor)
        torch.manual_seed(5)
        network = experts.SwiGLU(24) if degrees[0] > 1 else experts.FeedForward(24, "gelu", bias=True)
        gate = gates.TopK(4, k=2, capacity_factor=1.5)
        layer = fusedmoe.MoELayer(16, gate, network, topology=topology, schedule=schedule)
        for tokens in (12, 9):
            step(record, str(tokens), layer, batch(rank, tokens + rank))


def placed(record: Record, rank: int, world: int, scratch: Path) -> None:
    with topology_of({"ep": 2}) as topology, public("open_heap")(topology.ep, torch.device("cpu")) as heap:
        placed_by(record, rank, world, scratch, {"ep": 2}, {"balance": "exact"}, "layers", heap)
