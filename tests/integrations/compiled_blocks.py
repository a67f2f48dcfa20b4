"""Blocks of other libraries with experts over ranks, compiled one by one and compared with eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedmoe import Schedule
from fusedmoe.layers.scheduled_exchange import ScheduledExchange

#: Experts, and experts per token.
E, K = 4, 2


def planned(exchange: ScheduledExchange) -> None:
    """Make an integration's exchange use plans, with other chunk counts in backward than in forward."""
    exchange.set_schedule(Schedule("fsmoe", (3, 2)))


def split_experts(experts: nn.Module, rank: int, world: int) -> None:
    """Keep only a rank's part of the experts' parameters."""
    for parameter in experts.parameters():
        parameter.data = parameter.data.chunk(world)[rank].clone()


def compare(
    blocks: list[nn.Module], exchange_of: Callable[[Any], ScheduledExchange], width: int, sizes: list[int]
) -> tuple[int, float]:
    """Return the graph count of blocks with a schedule, and their largest difference from blocks without.

    The difference includes gradients.

    Args:
        sizes: of this rank's batches.
    """
    torch._dynamo.reset()
    model = nn.Sequential(*blocks)
    off, counter, worst = copy.deepcopy(model), CompileCounterWithBackend("aot_eager"), 0.0
    for block in model:
        planned(exchange_of(block))
        block.compile(backend=counter, fullgraph=True)
    for size in sizes:
        x_TD = torch.randn(size, width, dtype=torch.float64)
        ours, right = _step(model, x_TD), _step(off, x_TD)
        assert ours.keys() == right.keys()
        for name, wanted in right.items():
            worst = max(worst, float((ours[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1)))
    targets = {node.target for graph in counter.graphs for node in graph.graph.nodes}
    assert torch.ops.fusedmoe.scheduled_experts.default in targets
    return counter.frame_count, worst


def _step(blocks: nn.Module, x_TD: Tensor) -> dict[str, Tensor]:
    x_TD = x_TD.detach().requires_grad_()
    blocks.zero_grad(set_to_none=True)
    y_TD = blocks(x_TD)
    y_TD.square().sum().backward()
    assert x_TD.grad is not None
    grads = {name: parameter.grad for name, parameter in blocks.named_parameters() if parameter.grad is not None}
    return {"y": y_TD.detach(), "dx": x_TD.grad, **grads}
