"""Rank functions of two nodes for `Cluster.run` in tests of the fused operations, in Triton's interpreter."""

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
    """Return the sizes of one forward pass's puts to the remote peer, and the number of NVSHMEM arrival queries."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    with FarHeap(topology.ep, CPU, APART) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(tokens, SLOTS, EXPERTS, WIDTH, torch.float32))
        case = Case(rank, world, tokens, 0, False)
        experts = GroupedExperts(Weights(*case.own), "swiglu")
        fused_experts(case.x_SM, case.weight_SK, case.layout, buffers, experts)
        return heap.wire.puts, heap.wire.asked


def return_twice(rank: int, world: int, sooner: int, held_s: float) -> tuple[int, bool]:
    """Run two exchanges of results without tokens between; rank 0's first put is read from its staging late.

    Args:
        sooner: the second exchange waits for an exchange this many earlier than it should.
        held_s: delay of the first put's read; the read also starts once the second exchange is put.
    Returns:
        The number of rows with another exchange's values, and whether the second put preceded the first's read.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    rows, wrong, early = 6, 0, False
    last = torch.tensor([rows], dtype=torch.int32)
    peer_R, result_row_R = torch.full((rows,), 1 - rank, dtype=torch.int32), torch.arange(rows)
    num_rows_W = torch.zeros(world, dtype=torch.int32).index_fill(0, torch.tensor([1 - rank]), rows)
    with FarHeap(topology.ep, CPU, APART) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(rows, 1, world, 4, torch.float32, degree=1))
        results = buffers.results
        for number in (1, 2):
            slot = buffers.next_slot(results)
            epoch = results.epochs[slot]
            with buffers.watch.guard_launches():
                every = torch.arange(world, dtype=torch.int32)
                remote.wait_signals(results.credits, every, epoch, buffers.bounds, behind=1 + sooner)
            if rank == 0 and number == 1:
                heap.wire.hold(held_s)
            signal = buffers.result_signal(0, slot)
            addresses = define_addresses(peer_R, result_row_R, buffers.returned, slot, 0)
            counter_W, signal_W = torch.zeros_like(num_rows_W), buffers.result_signal_addresses(signal)
            told = Put(results.rows, addresses, None, num_rows_W, counter_W, signal_W, epoch, signal)
            values = define_addresses(peer_R, result_row_R, buffers.value_return_buffers, slot, 0)
            put.put_values(torch.full((rows,), float(number)), values, last)
            returned_rows.return_rows(torch.full((rows, 4), float(number)), last, told)
            if number == 2:
                early = heap.wire.let_go()
            with buffers.watch.guard_launches():
                index = buffers.result_signal_indices(1, slot)
                remote.wait_signals(results.signals, index, epoch, buffers.bounds, buffers.network)
            wrong += int((results.rows[slot, 0] != number).any(1).sum() + (buffers.value_rows[slot] != number).sum())
            put.give_credit(results, slot)
    return wrong, early
