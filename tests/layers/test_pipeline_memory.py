"""Blocks in micro-batches need the memory of blocks without overlap plus that of the chunks in flight."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import experts, gates
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.topology import Topology
from fusedmoe.engine import run as engine
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher
from fusedmoe.kernels import experts as kernels
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.workload import Workload
from tests.layers.test_pipeline import without_overlap
from tests.layers.test_pipeline_plans import COSTS, halves
from tests.memory import PeakMemory

M, H, E, K, L, B, LAYERS = 32, 64, 8, 2, 32, 8, 3
ROWS = B * L * K
FLOAT, INDEX = 4, 8


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(M), nn.Linear(M, M)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        y_BLM = x_BLM + self.map(x_BLM)
        return y_BLM, self.norm(y_BLM)


def make_blocks(**options: Any) -> list[Parts]:
    return [
        Parts(Dense(), fusedmoe.MoELayer(M, gates.TopK(E, K), experts.FeedForward(H), **options)) for _ in range(LAYERS)
    ]


class Apart(Collectives):
    """Dispatch, experts and combine through autograd, which sees only an operation's results.

    Rows are saved at the receiver, also on one rank.
    """

    through_experts = Dispatcher.through_experts


def peak_bytes(run: Callable[[Tensor], Tensor]) -> int:
    gc.collect()
    x_BLM, weight_BLM = torch.randn(2, B, L, M)
    with PeakMemory() as memory:
        (run(x_BLM) * weight_BLM).sum().backward()
    return memory.peak


def max_pending_weight_gradients(plan: Plan) -> int:
    """Return the largest number of chunks with pending weight gradients."""
    most = now = 0
    for task in plan.sequence:
        now += {"expert": 1, "weight-gradient": -1}.get(task.kind, 0)
        most = max(most, now)
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        *(pytest.param(StepSplit(*of), marks=pytest.mark.slow) for of in ((1, 1), (4, 4), (4, 2), (2, 8))),
        StepSplit(4, 4, weights=True),
    ],
    ids=str,
)
def test_peak_memory_is_within_bound(split: StepSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_sequence(plan: Plan, bodies: Any, **_: Any) -> None:
        with torch.no_grad():
            for task in plan.sequence:
                bodies[task.kind](task)

    # One thread, because the operation counter sees only its own thread.
    monkeypatch.setattr(engine, "execute", in_sequence)
    # Otherwise all experts of so small a batch would share one block, with buffers as large as the limit that the plan
    # is checked against.
    monkeypatch.setattr(kernels, "_SLICE_BYTES", FLOAT * H)
    plain = peak_bytes(without_overlap(make_blocks(dispatch=Apart(Topology(), make_all_to_all("direct", Topology())))))
    blocks = make_blocks()
    run = fusedmoe.pipeline(blocks)
    costs = Workload(B, L, M, H, E, k=K).step_costs(COSTS, [0] * LAYERS, blocks[0].experts.parts, whole=True)
    plans = halves(micro_schedule(costs, split).plan())
    run.set_plan(plans)
    found = peak_bytes(run)
    # A chunk's rows as sent and as received, and their gradients; its activations and their gradients.
    row = FLOAT * (4 * M + 2 * H)
    allowed = ROWS // min(split.forward, split.backward) * row
    if split.forward != split.backward:
        allowed += ROWS * FLOAT * (M + H)  # one layer's rows and pre-activations, rechunked
    if split.weights:
        allowed += max_pending_weight_gradients(plans.backward) * ROWS // split.backward * FLOAT * (2 * M + 2 * H)
    assert plain < found <= plain + allowed + LAYERS * 5 * ROWS * INDEX


def test_peak_memory_counts_live_storages() -> None:
    with PeakMemory() as memory:
        x = torch.empty(1000)
        y = x + 1
        del x
        assert memory.now == 4000 and memory.peak == 8000
        z = y[:10]
        del y
        assert memory.now == 4000
        del z
    assert memory.now == 0 and memory.peak == 8000
