"""Blocks of other libraries with experts over ranks, compiled one by one, beside the same blocks as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedmoe import Schedule
from fusedmoe.layers.scheduled_exchange import ScheduledExchange

#: Experts, and those of a token.
E, K = 4, 2


def planned(exchange: ScheduledExchange) -> None:
    """Has a door's exchange work by plans, with other numbers of chunks backward."""
    exchange.set_schedule(Schedule("fsmoe", (3, 2)))


def split_experts(experts: nn.Module, rank: int, world: int) -> None:
    """Leaves a rank its own part of the experts' parameters."""
    for parameter in experts.parameters():
        parameter.data = parameter.data.chunk(world)[rank].clone()


def compare(
    blocks: list[nn.Module], exchange_of: Callable[[Any], ScheduledExchange], width: int, sizes: list[int]
) -> tuple[int, float]:
    """How many graphs blocks with a schedule need, and how far off they are from blocks without, gradients included.

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
