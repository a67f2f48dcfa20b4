"""Rank functions for `Cluster.run` in tests of the fused operations, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.experts import experts as local_experts
from fusedmoe.autograd.moves import through_experts
from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import RowForm, TokenCounts
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.engine.planned import PlannedBatch, PlannedFunction
from fusedmoe.engine.run import Plans, Run
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.deduplicate import deduplicate_tokens
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.one_sided import expand_to_shards
from fusedmoe.kernels.triton.one_sided import put, remote
from fusedmoe.schedule.task import PHASES, PIPELINE, Task
from fusedmoe.schedule.task_orders import list_plan
from tests.kernels.device.far import FarHeap

CPU = torch.device("cpu")
EXPERTS, SLOTS, WIDTH, HIDDEN = 4, 2, 40, 24


class Case:
    """Random tokens of one rank, and all experts' parameters, equal on all ranks."""

    def __init__(self, rank: int, world: int, tokens: int, seed: int, bias: bool) -> None:
        own, common = (torch.Generator().manual_seed(7919 * seed + i) for i in (1 + rank, 0))
        self.x_SM = torch.randn(tokens, WIDTH, generator=own)
        self.weight_SK = torch.rand(tokens, SLOTS, generator=own)
        self.dy_SM = torch.randn(tokens, WIDTH, generator=own)
        expert_SK = torch.rand(tokens, EXPERTS, generator=own).argsort(1)[:, :SLOTS]
        if seed % 2:
            expert_SK = expert_SK % (EXPERTS - 1)  # the last expert has no rows; some tokens choose an expert twice
            expert_SK[:, 1][expert_SK[:, 0] == expert_SK[:, 1]] = -1
        self.expert_SK, self.layout = expert_SK, order(expert_SK, EXPERTS, 3 if seed % 3 == 2 else None)
        shapes = [(EXPERTS, 2, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)]
        shapes += [(EXPERTS, 2, HIDDEN), (EXPERTS, WIDTH)] if bias else []
        self.parameters = [torch.randn(*shape, generator=common) for shape in shapes]
        local = EXPERTS // world
        self.own = [p[rank * local : (rank + 1) * local].clone() for p in self.parameters]


def leaves(case: Case) -> tuple[Tensor, Tensor, GroupedExperts]:
    parameters = [p.clone().requires_grad_() for p in case.own]
    experts = GroupedExperts(Weights(*parameters), "swiglu")
    return case.x_SM.clone().requires_grad_(), case.weight_SK.clone().requires_grad_(), experts


def results(y: Tensor, x: Tensor, weight: Tensor, experts: GroupedExperts, dy: Tensor) -> list[Tensor]:
    y.backward(dy)
    found = [y.detach(), x.grad, weight.grad, *(p.grad for p in experts.parameters if p is not None)]
    return [torch.zeros(0) if one is None else one for one in found]


#: Chunk counts: one for both passes, or one per pass.
Degree = int | tuple[int, int]


def by_collectives(case: Case, topology: Topology, degree: Degree) -> list[Tensor]:
    x, weight, experts = leaves(case)
    layout = case.layout.exact()
    sent = deduplicate_tokens(layout, topology.ep.size)
    given = make_all_to_all("direct", topology), topology.esp, layout.counts_E, RowForm.of(x, layout, weight)
    exchange = exchange_metadata(*given, tokens=TokenCounts(sent.tokens.counts_E))
    sent = sent.exact(exchange.num_sent, layout.rows)
    degrees = (degree, degree) if isinstance(degree, int) else degree
    tasks = {
        phase: [Task(kind, i, 0, phase) for i in range(chunks) for kind in PIPELINE if kind in _NEEDED]
        for phase, chunks in zip(PHASES, degrees, strict=True)
    }
    plans = Plans(*(list_plan(of, dict.fromkeys(of, 1.0)) for of in tasks.values()))
    run = Run(plans, partial(topology.stop, "test"))
    batch = PlannedBatch(sent, exchange, experts, run)
    y = PlannedFunction.apply(x, take_pairs(weight, layout), batch, None, *experts.parameters)
    return results(y, x, weight, experts, case.dy_SM)


_NEEDED = ("dispatch", "expert", "combine")


def by_puts(case: Case, buffers: ReceiveBuffers, degree: Degree, rows: int | None = None) -> list[Tensor]:
    x, weight, experts = leaves(case)
    y = fused_experts(x, weight, case.layout, buffers, experts, degree, rows=rows)
    return results(y, x, weight, experts, case.dy_SM)


def heap_over(group: Group, nodes: Sequence[int], breaks: Sequence[str] = ()) -> Heap:
    """`nodes`: of each rank; none if all ranks share one node. `breaks`: as `Wire.breaks`."""
    return FarHeap(group, CPU, nodes, breaks) if nodes else open_heap(group, CPU)


def compare(
    rank: int,
    world: int,
    tokens: list[int],
    degrees: list[Degree],
    bias: bool,
    nodes: Sequence[int] = (),
    breaks: Sequence[str] = (),
) -> list[str]:
    """Describe differences from the collectives."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    wrong = []
    with heap_over(topology.ep, nodes, breaks) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(max(tokens), SLOTS, EXPERTS, WIDTH, torch.float32))
        for seed, degree in enumerate(degrees):
            case = Case(rank, world, tokens[rank], seed, bias)
            right = by_collectives(case, topology, degree)
            found = by_puts(case, buffers, degree)
            for place, (one, other) in enumerate(zip(found, right, strict=True)):
                if not is_equal_up_to_rounding(one, other):
                    worst = float((one - other).abs().max()) if one.shape == other.shape else one.shape
                    wrong.append(f"degree {degree}, result {place}: {worst}")
    return wrong


def is_equal_up_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether no difference is above 2e-6 of the largest value.

    An expert's rows arrive in another order, so sums over them (parameter gradients) round differently. On some CPUs
    BLAS also rounds the product of a row differently in a matrix of another height.
    """
    largest = float(other.abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=2e-6 * largest)


def compare_shards(rank: int, world: int, rows: list[int]) -> list[str]:
    """Describe differences from collectives for experts that are split over all ranks."""
    topology = Topology.from_sizes(esp=world, timeout_s=30)
    wrong = []
    with open_heap(topology.esp, CPU) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(max(rows), world, EXPERTS * world, WIDTH, torch.float32))
        for degree in (1, 3):
            case = Case(rank, 1, rows[rank], degree, False)
            expert_R1 = case.layout.row_SK.new_tensor([[s % EXPERTS] for s in range(rows[rank])]).view(-1, 1)
            layout, part = order(expert_R1, EXPERTS), HIDDEN // world
            columns = slice(rank * part, (rank + 1) * part)
            case.own = [case.parameters[0][:, :, columns].contiguous(), case.parameters[1][:, :, columns].contiguous()]

            x, weight, experts = leaves(case)
            one_S1 = weight[:, :1]
            every = expand_to_shards(layout, world)
            y = fused_experts(x, one_S1.expand(-1, world), every, buffers, experts, degree)
            found = results(y, x, weight, experts, case.dy_SM)

            x, weight, experts = leaves(case)
            form = RowForm.of(x, layout, weight)
            exchange = exchange_metadata(make_all_to_all("direct", topology), topology.esp, layout.counts_E, form)
            compute = partial(local_experts, weights=experts.weights, activation="swiglu")
            x_NM = x[layout.source_N]
            y_NM = through_experts(x_NM, take_pairs(weight[:, :1], layout), exchange, compute)
            y = torch.zeros_like(x).index_put((layout.source_N,), y_NM)
            wanted = results(y, x, weight, experts, case.dy_SM)
            for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
                # Otherwise summation orders differ: over chunks for parameters, over shards for tokens.
                exact = place != 1 and (degree == 1 or place < 3)
                if not (torch.equal(one, other) if exact else torch.allclose(one, other, atol=1e-3)):
                    wrong.append(f"degree {degree}, result {place}: {(one - other).abs().max()}")
    return wrong


class Exchanges:
    """Rows of one value, put to all ranks and awaited, exchange after exchange."""

    def __init__(self, buffers: ReceiveBuffers, rank: int, world: int) -> None:
        self.buffers, self.rank, self.world = buffers, rank, world
        self.used_W = torch.full((world,), buffers.sizes.tokens, dtype=torch.int32)
        capacity = buffers.tokens.rows.shape[2]
        source_C = torch.arange(capacity, dtype=torch.int32) % buffers.sizes.tokens
        self.source_WC = source_C.expand(world, -1).contiguous()
        tiles = buffers.tokens.signals.shape[2]
        self.used_tiles = -(-buffers.sizes.tokens // buffers.tokens.tile)
        self.index = torch.tensor([p * tiles + t for p in range(world) for t in range(self.used_tiles)]).int()

    def put(self, number: int) -> int:
        buffers = self.buffers
        slot = buffers.next_slot(buffers.tokens)
        x = torch.full((buffers.sizes.tokens, buffers.sizes.width), float(number * self.world + self.rank))
        with buffers.watch.guard_launches():
            put.put_rows(buffers.bounds, put.SentRows(x, self.source_WC, self.used_W, buffers.tokens, slot))
        return slot

    def take(self, slot: int) -> list[list[float]]:
        """Return per rank the distinct received values."""
        buffers, epoch = self.buffers, self.buffers.tokens.epochs[slot]
        index = self.index + slot * buffers.tokens.signals[0].numel()
        with buffers.watch.guard_launches():
            remote.wait_signals(buffers.tokens.signals, index, epoch, buffers.bounds, buffers.network)
        rows = buffers.tokens.rows[slot, :, : buffers.sizes.tokens]
        found = [of.unique().tolist() for of in rows]
        put.give_credit(buffers.tokens, slot)
        return found


def delay(run: Any, most_s: float, draw: random.Random) -> Any:
    def delayed(*arguments: Any, **more: Any) -> Any:
        if draw.random() < 0.5:
            time.sleep(draw.random() * most_s)
        return run(*arguments, **more)

    return delayed


def exchange_often(rank: int, world: int, count: int, ahead: bool, nodes: Sequence[int] = ()) -> int:
    """Exchange with random delays. `ahead`: put the next exchange before reading the current one."""
    draw = random.Random(rank)
    places = ((put, "put_rows"), (remote, "wait_signals"), (put, "give_credit"), (put, "signal"))
    kept = [(module, name, getattr(module, name)) for module, name in places]
    for module, name, run in kept:
        setattr(module, name, delay(run, 0.002, draw))
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    wrong = 0
    try:
        with heap_over(topology.ep, nodes) as heap:
            exchanges = Exchanges(ReceiveBuffers(heap, BufferSizes(20, 1, world, 8, torch.float32)), rank, world)
            waiting: list[tuple[int, int]] = []
            for number in range(count):
                waiting.append((number, exchanges.put(number)))
                while len(waiting) > (1 if ahead and number + 1 < count else 0):
                    first, slot = waiting.pop(0)
                    wrong += exchanges.take(slot) != [[float(first * world + p)] for p in range(world)]
    finally:
        for module, name, run in kept:
            setattr(module, name, run)
    return wrong


def fail_in_the_middle(rank: int, world: int, how: str, timeout_s: float) -> str:
    """Rank 1 fails after several exchanges; return the other ranks' errors."""
    topology = Topology.from_sizes(ep=world, timeout_s=timeout_s)
    heap = open_heap(topology.ep, CPU)
    with topology.guard("test"), heap:
        exchanges = Exchanges(ReceiveBuffers(heap, BufferSizes(20, 1, world, 8, torch.float32)), rank, world)
        for number in range(6):
            if rank == 1 and number == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raises":
                    raise ValueError("no more")
                if how == "late":
                    time.sleep(1.0)  # four polls of the other rank
                if how == "never":
                    assert topology.world.board.read(wait_s=60.0) is not None
                    return "never came"
            exchanges.take(exchanges.put(number))
    return f"done, {heap.is_abandoned}"


def refuse(rank: int, world: int) -> str:
    """A batch without room is refused before anything is sent, and the next batch succeeds."""
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    with open_heap(topology.ep, CPU) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(8, SLOTS, EXPERTS, WIDTH, torch.float32))
        big, small = Case(rank, world, 9, 0, False), Case(rank, world, 8, 0, False)
        with contextlib.suppress(ConfigError):
            by_puts(small, buffers, 1, rows=0)
            return "taken"
        try:
            by_puts(big, buffers, 1)
        except ConfigError as error:
            by_puts(small, buffers, 2)
            return str(error)
    return "taken"


def allocate_differently(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    with open_heap(topology.ep, CPU) as heap:
        heap.allocate((4, 4 + rank), torch.float32)
