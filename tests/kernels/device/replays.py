"""Rank functions for `Cluster.run` in tests of captured passes, in Triton's interpreter.

A step is recorded once (`Recording`) and replayed with other tokens, loads and parameters: the same launches, with the
same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

import fusedmoe
from fusedmoe.autograd.order import order
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_dispatcher import _shared_buffers
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.errors import RankError
from fusedmoe.kernels.experts import Weights
from tests.kernels.device.capture import Recording
from tests.kernels.device.delays import delayed
from tests.kernels.device.fused_layers import WIDTH as MODEL_DIM
from tests.kernels.device.fused_layers import layer_of
from tests.kernels.device.on_buffers import (
    EXPERTS,
    SLOTS,
    WIDTH,
    Case,
    by_collectives,
    heap_over,
    is_equal_up_to_rounding,
)


def _case(rank: int, world: int, tokens: int, seed: int) -> Case:
    case = Case(rank, world, tokens, seed, False)
    case.layout = order(case.expert_SK, EXPERTS)
    return case


def _rows(world: int, tokens: Sequence[int], seed: int) -> list[int]:
    """Count the rows received by each rank."""
    cases = [_case(rank, world, count, seed) for rank, count in enumerate(tokens)]
    return sum(case.layout.counts_E for case in cases).view(world, -1).sum(1).tolist()  # type: ignore[union-attr]


def replay_passes(
    rank: int,
    world: int,
    tokens: Sequence[int],
    degrees: tuple[int, int],
    steps: int,
    spare: int = 0,
    old: bool = False,
    nodes: Sequence[int] = (),
    delays: int | None = None,
) -> list[str]:
    """Replay both passes for several steps; describe differences from the collectives.

    Args:
        delays: seed of random delays inside kernels; None: no delays.
        spare: additional room beyond the fullest rank's rows.
        old: each replay begins with the numbers of the first, and rank 1 later than the other ranks.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    rows = spare + max(max(_rows(world, tokens, seed)) for seed in range(steps + 1))
    wrong = []
    slowed = nullcontext() if delays is None else delayed(rank, delays)
    with heap_over(topology.ep, nodes) as heap, slowed:
        buffers = ReceiveBuffers(heap, BufferSizes(max(tokens), SLOTS, EXPERTS, WIDTH, torch.float32))
        first = _case(rank, world, tokens[rank], 0)
        memory = [first.expert_SK, first.x_SM, first.weight_SK, first.dy_SM, *first.own]
        expert_SK, x, weight, dy, *own = (one.clone() for one in memory)
        leaves = [one.requires_grad_() for one in (x, weight, *own)]
        with Recording() as graph:
            experts = GroupedExperts(Weights(*own), "swiglu")
            y = fused_experts(x, weight, order(expert_SK, EXPERTS), buffers, experts, degrees, rows=rows)
            found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        numbers = [one.clone() for place in (buffers.metadata, buffers.tokens, buffers.results) for one in place.epochs]
        kept = []
        # Back to back, so a step may begin while a slow peer still reads rows of the previous step.
        for seed in range(steps + 1):
            case = _case(rank, world, tokens[rank], seed)
            if seed:  # the first step ran while it was recorded
                given = [case.expert_SK, case.x_SM, case.weight_SK, case.dy_SM, *case.own]
                with torch.no_grad():
                    for at, value in zip((expert_SK, x, weight, dy, *own), given, strict=True):
                        at.copy_(value)
                if old:
                    places = (buffers.metadata, buffers.tokens, buffers.results)
                    for at, value in zip((at for place in places for at in place.epochs), numbers, strict=True):
                        at.copy_(value - 1)
                    time.sleep(0.5 * (rank == 1))
                with buffers.watch.guard_launches():
                    graph.replay()
            kept.append((case, [one.clone() for one in found]))
        for seed, (case, results) in enumerate(kept):
            for place, (one, other) in enumerate(zip(results, by_collectives(case, topology, degrees), strict=True)):
                if not is_equal_up_to_rounding(one, other):
                    wrong.append(f"step {seed}, result {place}: {_difference(one, other)}")
    return wrong


def _difference(one: Tensor, other: Tensor) -> str:
    """Describe a difference: a stale row is off by its full values, a sum in another order by a few roundings."""
    count, rows = int((one != other).sum()), (one != other).flatten(1).any(1).nonzero().flatten().tolist()
    worst, largest = float((one - other).abs().max()), float(other.abs().max())
    return f"{count} of {one.numel()} elements, in rows {rows}, by up to {worst}; the largest is {largest}"


def _schedule(row_factor: float) -> fusedmoe.Schedule:
    return fusedmoe.Schedule("fused", degrees=(2, 1), row_factor=row_factor)


def replay_layer(rank: int, world: int, sizes: dict[str, int], steps: int) -> list[str]:
    """Replay a whole layer's step; describe differences from the layer without a schedule."""
    topology = Topology.from_sizes(**sizes, timeout_s=30)
    plain = layer_of(topology, "off", fusedmoe.experts.SwiGLU(24))
    layer = layer_of(topology, _schedule(2.0), fusedmoe.experts.SwiGLU(24))
    layer.load_state_dict(plain.state_dict())
    draw, wrong = torch.Generator().manual_seed(17 + rank), []
    x = torch.randn(11, MODEL_DIM, generator=draw, requires_grad=True)
    layer(x)  # selects sending kernels
    with Recording() as graph:
        y = layer(x)
        (y.square().mean() + layer.aux_loss).backward()
    (buffers,) = _shared_buffers[topology].values()
    for step in range(steps):
        given = torch.randn(11, MODEL_DIM, generator=draw)
        with torch.no_grad():
            x.copy_(given)
        with buffers.watch.guard_launches():
            graph.replay()
        again = given.clone().requires_grad_()
        right = plain(again)
        plain.zero_grad()
        (right.square().mean() + plain.aux_loss).backward()
        pairs = zip((y, x.grad, *_grads(layer)), (right, again.grad, *_grads(plain)), strict=True)
        for place, (one, other) in enumerate(pairs):
            if not torch.allclose(one, other, 1e-4, 1e-5):
                wrong.append(f"step {step}, result {place}: {(one - other).abs().max()}")
    layer.check()
    return wrong


def _grads(layer: torch.nn.Module) -> list[Tensor]:
    return [torch.zeros(0) if one.grad is None else one.grad for one in layer.parameters()]


def tell_late(rank: int, world: int, how: str) -> str:
    """Return the errors of a forward with too many rows, or with non-finite logits on rank 1.

    The next forward raises them if `how` contains "eager", otherwise `layer.check`.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    layer = layer_of(topology, _schedule(1.4), fusedmoe.experts.SwiGLU(24))
    x = torch.randn(12, MODEL_DIM, generator=torch.Generator().manual_seed(rank))
    layer(x)
    layer.check()
    if "rows" in how:
        layer.gate.weight_EM.data[2:] = 1.0  # rank 1's experts
        x = x.abs()
    elif rank == 1:
        x[3, 4] = float("nan")
    layer(x)
    with torch.no_grad():
        try:
            if "eager" in how:
                layer(x)
            layer.check()
        except RankError as error:
            return str(error)
    return "nothing"
