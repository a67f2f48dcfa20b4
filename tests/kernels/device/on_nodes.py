"""What ranks of two nodes do in tests of the fused operations: functions for `Cluster.run`, in Triton's interpreter."""

from __future__ import annotations

import torch

from bench.gpu import returned_rows
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.one_sided import Put, define_addresses
from fusedmoe.kernels.triton.one_sided import put, remote
from tests.kernels.device.far import FarHeap
from tests.kernels.device.on_buffers import CPU, EXPERTS, SLOTS, WIDTH, Case

APART = (0, 1)


def count_puts(rank: int, world: int, tokens: int) -> tuple[list[int], int]:
    """Sizes of what one forward pass puts to the far peer, and how often NVSHMEM was asked whether rows had arrived."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    with FarHeap(topology.ep, CPU, APART) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(tokens, SLOTS, EXPERTS, WIDTH, torch.float32))
        case = Case(rank, world, tokens, 0, False)
        experts = GroupedExperts(Weights(*case.own), "swiglu")
        fused_experts(case.x_SM, case.weight_SK, case.layout, buffers, experts)
        return heap.wire.puts, heap.wire.asked


def return_twice(rank: int, world: int, sooner: int, held_s: float) -> tuple[int, bool]:
    """Two exchanges of results without tokens between; what rank 0 puts first is read out of its staging late.

    Args:
        sooner: the second does not wait for what it should, but for so many exchanges before.
        held_s: so late, or when the second one is put as well.
    Returns:
        How many rows were not those of their exchange, and whether the second was put before the first was read.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    rows, wrong, early = 6, 0, False
    last = torch.tensor([rows], dtype=torch.int32)
    peer_R, place_R = torch.full((rows,), 1 - rank, dtype=torch.int32), torch.arange(rows)
    wanted_W = torch.zeros(world, dtype=torch.int32).index_fill(0, torch.tensor([1 - rank]), rows)
    with FarHeap(topology.ep, CPU, APART) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(rows, 1, world, 4, torch.float32, degree=1))
        results = buffers.results
        for number in (1, 2):
            slot = buffers.begin(results)
            epoch = results.epochs[slot]
            with buffers.watch.over():
                every = torch.arange(world, dtype=torch.int32)
                remote.wait_signals(results.credits, every, epoch, buffers.bounds, behind=1 + sooner)
            if rank == 0 and number == 1:
                heap.wire.hold(held_s)
            mark = buffers.result_mark(0, slot)
            addresses = define_addresses(peer_R, place_R, buffers.returned, slot, 0)
            counter_W, signal_W = torch.zeros_like(wanted_W), buffers.result_signals(mark)
            told = Put(results.rows, addresses, None, wanted_W, counter_W, signal_W, epoch, mark)
            values = define_addresses(peer_R, place_R, buffers.returned_values, slot, 0)
            put.put_values(torch.full((rows,), float(number)), values, last)
            returned_rows.return_rows(torch.full((rows, 4), float(number)), last, told)
            if number == 2:
                early = heap.wire.let_go()
            with buffers.watch.over():
                index = buffers.awaited_results(1, slot)
                remote.wait_signals(results.signals, index, epoch, buffers.bounds, buffers.network)
            wrong += int((results.rows[slot, 0] != number).any(1).sum() + (buffers.value_rows[slot] != number).sum())
            put.give_credit(results, slot)
    return wrong, early
