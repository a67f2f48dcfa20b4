"""Addresses in receive buffers passed to kernels, near and far."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.gpu.virtual_heaps import LocalHeap
from fusedmoe.comm.group import Job
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.kernels.one_sided import Network, define_addresses

CPU = torch.device("cpu")
SIZES = BufferSizes(tokens=6, k=2, experts=8, width=16, dtype=torch.float32, degree=3)


class HalfHeap(LocalHeap):
    """The first half of the ranks is near, the second half far."""

    def __init__(self, index: int, size: int, everything: list[Tensor]) -> None:
        super().__init__(index, size, CPU, everything, Job(index, 10.0))
        self.network = Network(torch.arange(size, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), {})

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        own, addresses = super()._map(size)
        half = self.group.size // 2
        return own, [*addresses[:half], *[0] * (self.group.size - half)]


@pytest.fixture
def buffers() -> ReceiveBuffers:
    """Buffers of rank 0 of 4, which reaches rank 1."""
    return ReceiveBuffers(HalfHeap(0, 4, []), SIZES)


def test_results_for_remote_peers_are_staged(buffers: ReceiveBuffers) -> None:
    peer_R = torch.tensor([1, 1, 2, 2, 3], dtype=torch.int32)
    result_row_R = torch.tensor([4, 5, 0, 1, 7])
    for rows, size in (
        (buffers.returned, 64),
        (buffers.value_return_buffers, 4),
    ):
        addresses, own, table = define_addresses(peer_R, result_row_R, rows, 1, 9), rows.own, rows.table
        behind = 12 * size  # in the second slot, after 6 tokens' 2 results
        store, target = addresses.store_N.tolist(), addresses.target_N
        assert store[:2] == [int(table[1]) + behind + size * at for at in (4, 5)]
        # Here they are contiguous, in staging rows from the ninth on.
        assert [store[3] - store[2], store[4] - store[3]] == [size, size]
        there = [own.data_ptr() + behind + size * at for at in (0, 1, 7)]
        assert target is not None and target.tolist() == [0, 0, *there]
        assert addresses.network is buffers.network and torch.equal(addresses.peer_N, peer_R)


def test_staging_fits_rows_of_all_chunks(buffers: ReceiveBuffers) -> None:
    """As many rows as a rank can receive, in chunks bounded by `Route._max_rows`, rounded up."""
    for degree in (1, 2, 3):
        chunk = (-(-SIZES.tokens * SIZES.k // degree) + buffers.experts) * 4
        chunk = -(-chunk // 4) * 4
        peer_R = torch.full((chunk,), 3, dtype=torch.int32)
        for rows in (buffers.returned, buffers.value_return_buffers):
            staging = rows.staging
            assert staging is not None
            last = define_addresses(peer_R, torch.arange(chunk), rows, 0, chunk * (degree - 1)).store_N[-1]
            size = staging.shape[1] * staging.itemsize
            assert staging.data_ptr() <= int(last) <= staging.data_ptr() + staging.numel() * staging.itemsize - size


def test_remote_peers_use_dummy_signal_address(buffers: ReceiveBuffers) -> None:
    signal = buffers.result_signal(2, 0)
    assert signal.signals is buffers.results.signals and signal.signal_index == (0 * 4 + 0) * 3 + 2
    own, near, *far = buffers.result_signal_addresses(signal).tolist()
    assert [own, near] == [int(address) + 8 * signal.signal_index for address in signal.table[:2]]
    assert buffers.network is not None and far == [buffers.network.dummy_signal.data_ptr()] * 2


def test_result_slots_depend_on_network(buffers: ReceiveBuffers) -> None:
    assert buffers.results.slots == 1 and [buffers.next_slot(buffers.results) for _ in range(3)] == [0, 0, 0]
    plain = ReceiveBuffers(LocalHeap(0, 4, CPU, [], Job()), SIZES)
    assert plain.network is None and [plain.next_slot(plain.results) for _ in range(3)] == [0, 1, 0]
    assert plain.credit_W[1].tolist() == [4, 5, 6, 7] and plain.result_signal(2, 1).signal_index == (1 * 4 + 0) * 3 + 2
    assert plain.tokens.staging is None and plain.metadata.staging is None
    peer_R, result_row_R = torch.tensor([2], dtype=torch.int32), torch.tensor([3])
    sent = define_addresses(peer_R, result_row_R, plain.returned, 0, 0)
    assert sent.target_N is None and sent.network is None
    assert sent.store_N.tolist() == [int(plain.results.row_table[2]) + 3 * 64]


def test_tokens_and_metadata_have_separate_staging(buffers: ReceiveBuffers) -> None:
    for place in (buffers.tokens, buffers.metadata):
        assert place.staging is not None and place.staging.shape == place.rows.shape
        assert place.staging.data_ptr() != place.rows.data_ptr() and place.network is buffers.network
    assert buffers.results.staging is None
