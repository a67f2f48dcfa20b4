"""Received results in one launch, compared with separate launches: sums, pair counts, and credit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.gpu.virtual_heaps import local_heaps
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.kernels.gather_sum import define_gather_sum, gather_sum, put_pairs
from fusedmoe.kernels.layout import Layout, build_layout
from fusedmoe.kernels.one_sided import FAULT
from fusedmoe.kernels.triton.one_sided import receive as module
from fusedmoe.kernels.triton.one_sided.receive import receive

PEERS, EXPERTS = 2, 4


def make_buffers(tokens: int, k: int, width: int, device: torch.device) -> tuple[list[ReceiveBuffers], Layout]:
    """Build buffers of two ranks, whose results hold random numbers; some pairs are empty and some are dropped."""
    heaps = local_heaps(PEERS, device, timeout_s=0.5)
    buffers = [ReceiveBuffers(heap, BufferSizes(max(1, tokens), k, EXPERTS, width, torch.float32)) for heap in heaps]
    for own in buffers:
        own.returned.own.normal_()
        own.value_return_buffers.own.normal_()
    expert_SK = torch.rand(tokens, EXPERTS).argsort(1)[:, :k]
    expert_SK[torch.rand(tokens, k) < 0.3] = -1
    return buffers, build_layout(expert_SK.to(device), EXPERTS, max(1, tokens * k // 3))


def credits_of(buffers: list[ReceiveBuffers], me: int) -> list[list[Tensor]]:
    """For metadata, tokens and results: this rank's credits at all ranks, [slots] each, and its slots' epochs."""
    places = [[own.metadata, own.tokens, own.results] for own in buffers]
    return [
        [*(one.credits[:, me] for one in of), *places[me][number].epochs]
        for number, of in enumerate(zip(*places, strict=True))
    ]


@pytest.mark.parametrize("programs", [2, 1024])
@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize(("tokens", "k", "width"), [(0, 2, 8), (1, 1, 8), (7, 3, 1030)])
def test_receive_equals_separate_launches(
    tokens: int, k: int, width: int, valued: bool, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRAMS", programs)
    torch.manual_seed(tokens)
    buffers, layout = make_buffers(tokens, k, width, device)
    me, own = 1, buffers[1]
    for epoch in (1, 2):
        rows_RM, value_R = own.result_rows[1], own.value_rows[1] if valued else None
        read = [*([] if valued else [(own.metadata, 0)]), (own.tokens, 1), (own.results, 1)]
        y_SM, value_SK = receive(rows_RM, layout, value_R, own.num_finished, read)
        assert torch.equal(y_SM, gather_sum(rows_RM, layout)), "to the last bit"
        there = Layout(*layout.tensors)
        wanted = define_gather_sum(rows_RM[: layout.rows].double(), there)
        torch.testing.assert_close(y_SM.double(), wanted, atol=1e-6, rtol=1e-6)
        assert (value_SK is None) == (value_R is None)
        if value_SK is not None and value_R is not None:
            assert torch.equal(value_SK, put_pairs(value_R, layout))
        metadata, tokens_, results = credits_of(buffers, me)
        for (*credit, first, second), slot in ((metadata, None if valued else 0), (tokens_, 1), (results, 1)):
            right = [epoch if number == slot else 0 for number in range(2)]
            assert [one.tolist() for one in credit] == [right] * PEERS
            assert [first.tolist(), second.tolist()] == [[1 + count] * PEERS for count in right]
        assert own.num_finished.tolist() == [0], "for the next launch"


def test_credit_is_sent_after_all_programs(device: torch.device) -> None:
    """Simulate one additional running program."""
    buffers, layout = make_buffers(7, 2, 16, device)
    own = buffers[0]
    own.num_finished.fill_(-1)
    receive(own.result_rows[0], layout, None, own.num_finished, [(own.results, 0)])
    assert own.num_finished.tolist() == [6]
    *credit, epoch, _ = credits_of(buffers, 0)[2]
    assert not torch.stack(credit).any() and epoch.tolist() == [1, 1]


@pytest.mark.parametrize("tokens", [0, 5])
def test_peer_fault_ends_all_waits(tokens: int, device: torch.device) -> None:
    """All waits end once a peer has reported a fault, also on a rank without tokens."""
    buffers, layout = make_buffers(tokens, 2, 16, device)
    own, word = buffers[0], (7 << 32) + 3
    receive(own.result_rows[0], layout, None, own.num_finished, [(own.results, 0)], own.faults)
    assert int(own.bounds.stop) == 0
    own.faults.received_W[1] = word
    receive(own.result_rows[0], layout, None, own.num_finished, [(own.results, 0)], own.faults)
    assert int(own.bounds.stop) == FAULT and own.bounds.record[:3].tolist() == [FAULT, 1, word]
