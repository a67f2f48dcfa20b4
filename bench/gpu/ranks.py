"""Virtual ranks on one GPU: a layer with tokens and experts distributed over W ranks that share the GPU's memory.

"puts": kernels of this library send rows while others compute, as between GPUs of a node. "copies": as with
collectives, a copy represents the transfer: rows are gathered, copied to their experts' rank, computed, copied back and
summed. Both compute the same as a single-rank layer, with all ranks in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.clock import Step
from bench.gpu.device import package_version
from bench.gpu.layer import Layer, leaf
from bench.gpu.returned_rows import return_rows
from bench.gpu.spread import PARTS
from bench.gpu.virtual_heaps import local_heaps
from fusedmoe import autograd
from fusedmoe.autograd.order import permute, take_pairs, unpermute
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import FusedBackward, FusedForward
from fusedmoe.engine.route import ReceivedChunks, Route
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.triton.one_sided.remote import wait_signals

_DEGREE = 2


class _Ranks:
    """Buffers of all ranks, and their tokens."""

    def __init__(self, case: Case, count: int) -> None:
        shape = case.shape
        tokens = -(-shape.S // count)
        sizes = BufferSizes(tokens, shape.K, shape.E, shape.M, case.x_SM.dtype, _DEGREE)
        self.count, self.experts = count, shape.E
        self.buffers = [ReceiveBuffers(heap, sizes) for heap in local_heaps(count, case.x_SM.device)]
        self.expert_SK = case.expert_SK.tensor_split(count)

    def routes(self, x_SM: Tensor, weight_SK: Tensor) -> list[Route]:
        parts = zip(*(whole.tensor_split(self.count) for whole in (x_SM, weight_SK)), self.expert_SK, strict=True)
        return [
            Route(x, weight, autograd.order(expert, self.experts), buffers, _DEGREE)
            for (x, weight, expert), buffers in zip(parts, self.buffers, strict=True)
        ]


def in_turn(runs: Sequence[FusedForward] | Sequence[FusedBackward]) -> None:
    """Run each step on all ranks before the next: on one GPU no rank may wait for a rank that has not started."""
    for run in runs:
        run.send()
    for run in runs:
        run.compute()


class _Puts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, x_SM: Tensor, weight_SK: Tensor, *weights: Tensor) -> Tensor:
        # requires_grad is not known here.
        learning = [part.detach().requires_grad_() for part in weights]
        tokens, routes = x_SM.tensor_split(ranks.count), ranks.routes(x_SM, weight_SK)
        runs = [
            FusedForward(x, route, GroupedExperts(Weights(*own), "swiglu"))
            for x, route, *own in zip(tokens, routes, *_halves(learning), strict=True)
        ]
        in_turn(runs)
        # Runs hold their own saved tensors; registering them lets `memory.py` count them.
        ctx.save_for_backward(*(tensor for run in runs for tensor in (*run.x, *run.h) if tensor is not None))
        ctx.runs, ctx.dtypes = runs, (weight_SK.dtype, weights[0].dtype)
        return torch.cat([run.finish() for run in runs])

    @staticmethod
    def backward(ctx: Any, dy_SM: Tensor) -> tuple[Tensor | None, ...]:
        runs = [FusedBackward(run, dy) for run, dy in zip(ctx.runs, dy_SM.tensor_split(len(ctx.runs)), strict=True)]
        in_turn(runs)
        dx, dweight = (torch.cat(parts) for parts in zip(*(run.finish() for run in runs), strict=True))
        dweights = [run.totals[which].to(ctx.dtypes[1]) for which in (0, 1) for run in runs]  # type: ignore[index]
        return None, dx, dweight.to(ctx.dtypes[0]), *dweights


def _leaves(case: Case, count: int) -> tuple[Tensor, ...]:
    """Return the case's tensors with separate matrices per rank: gradients of slices would have full size."""
    parts = (part for whole in (case.w1, case.w2) for part in whole.tensor_split(count))
    return (leaf(case.x_SM), leaf(case.weight_SK), *map(leaf, parts))


def _halves(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return weights[: len(weights) // 2], weights[len(weights) // 2 :]


def _whole(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return (*gradients[:2], *(torch.cat([*parts]) for parts in _halves(gradients[2:])))


def puts_layer(case: Case, count: int) -> Layer:
    leaves, ranks = _leaves(case, count), _Ranks(case, count)
    return Layer("puts", package_version("fusedmoe"), lambda: _Puts.apply(ranks, *leaves), leaves, _whole)


def copies_layer(case: Case, count: int) -> Layer:
    leaves = _leaves(case, count)
    x_SM, weight_SK, *weights = leaves
    experts = [Weights(*own) for own in zip(*_halves(weights), strict=True)]
    own = case.shape.E // count
    expert_SK = case.expert_SK.tensor_split(count)

    def forward() -> Tensor:
        layouts = [autograd.order(expert, case.shape.E).exact() for expert in expert_SK]
        counts_WE = torch.stack([layout.counts_E for layout in layouts])
        # Rows for each rank, as a host-side collective would receive them.
        shares_WW = counts_WE.reshape(count, count, own).sum(-1).tolist()
        rows, weights, out = [], [], []
        for x, weight, layout, shares in zip(
            x_SM.tensor_split(count), weight_SK.tensor_split(count), layouts, shares_WW, strict=True
        ):
            rows.append(permute(x, layout).split(shares))
            weights.append(take_pairs(weight, layout).split(shares))
        for rank in range(count):
            came_RM, weight_R = (torch.cat([parts[rank] for parts in of]) for of in (rows, weights))
            there_WE = counts_WE[:, rank * own : (rank + 1) * own]
            number = torch.arange(own, device=x_SM.device).repeat(count)
            expert_R1 = number.repeat_interleave(there_WE.flatten(), output_size=len(came_RM))[:, None]
            layout = autograd.order(expert_R1, own)
            weight_N = take_pairs(weight_R[:, None], layout)
            out_RM = autograd.experts(came_RM, layout, weight_N, experts[rank], "swiglu")
            out.append(out_RM.split([shares[rank] for shares in shares_WW]))
        back = [torch.cat([parts[rank] for parts in out]) for rank in range(count)]
        return torch.cat([unpermute(rows_NM, layout) for rows_NM, layout in zip(back, layouts, strict=True)])

    return Layer("copies", package_version("fusedmoe"), forward, leaves, _whole)


def _await_tokens(chunks: ReceivedChunks, chunk: int, slot: int) -> None:
    _, layout, wait = chunks.rows_in_flight(chunk, slot)
    assert layout.source_N is not None
    # Slack rows repeat a row that is awaited anyway, or the first tile's, which is always signalled.
    with chunks.buffers.watch.guard_launches():
        index = layout.source_N.div(wait.tile, rounding_mode="floor").to(torch.int32)
        wanted = index.unique() if not index.is_cuda else index
        wait_signals(wait.signals, wanted, wait.epoch, wait.bounds, wait.network)


def part_steps(case: Case, count: int) -> list[Step]:
    """Return the steps of dispatch, until rows are sorted at their experts, and of combine, on all ranks."""
    ranks = _Ranks(case, count)
    tokens = case.x_SM.tensor_split(count)

    def with_metadata() -> list[Route]:
        routes = ranks.routes(case.x_SM, case.weight_SK)
        for route in routes:
            route.put_metadata()
        for route in routes:
            route.forward  # noqa: B018  waits for the routing metadata
        return routes

    def dispatch(routes: list[Route]) -> list[list[Tensor]]:
        slots = [route.put_tokens(x) for route, x in zip(routes, tokens, strict=True)]
        rows = []
        for route, slot in zip(routes, slots, strict=True):
            chunks = route.forward
            for chunk in range(len(chunks)):
                _await_tokens(chunks, chunk, slot)
            rows.append(chunks.copy_rows(slot))
            route.mark_as_read(slot)
            route.give_credit()
        return rows

    def dispatched() -> tuple[list[Route], list[list[Tensor]]]:
        routes = with_metadata()
        return routes, dispatch(routes)

    def combine(given: tuple[list[Route], list[list[Tensor]]]) -> list[Tensor]:
        routes, rows = given
        slots = [route.begin_results() for route in routes]
        for route, slot, own in zip(routes, slots, rows, strict=True):
            for chunk, out_RM in enumerate(own):
                last = route.forward.arrivals[chunk].layout.offsets_E1[-1:]
                return_rows(out_RM, last, route.forward.make_put(chunk, slot))
        return [route.wait_for_results(slot, _DEGREE) for route, slot in zip(routes, slots, strict=True)]

    return [Step(PARTS[0], dispatch, with_metadata), Step(PARTS[1], combine, dispatched)]
