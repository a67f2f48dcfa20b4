"""Addresses in windows, near and far, as kernels are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedmoe.comm.group import Job
from fusedmoe.comm.heaps.local import LocalHeap
from fusedmoe.comm.windows import SLOTS, Room, Windows
from fusedmoe.kernels.one_sided import Network

CPU = torch.device("cpu")
ROOM = Room(tokens=6, slots=2, experts=8, width=16, dtype=torch.float32, degree=3)


class HalfHeap(LocalHeap):
    """Of which the first half of the ranks is near, and the others are far."""

    def __init__(self, index: int, size: int, everything: list[Tensor]) -> None:
        super().__init__(index, size, CPU, everything, Job(index, 10.0))
        self.network = Network(torch.arange(size, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), {})

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        own, addresses = super()._map(size)
        half = self.group.size // 2
        return own, [*addresses[:half], *[0] * (self.group.size - half)]


@pytest.fixture
def windows() -> Windows:
    """Of rank 0 of 4, who reaches rank 1."""
    return Windows(HalfHeap(0, 4, []), ROOM)


def test_results_for_far_peers_go_by_staging(windows: Windows) -> None:
    peer_R = torch.tensor([1, 1, 2, 2, 3], dtype=torch.int32)
    place_R = torch.tensor([4, 5, 0, 1, 7])
    for addresses, own, table, size in (
        (windows.result_addresses(peer_R, place_R, 2, 9), windows.results.rows, windows.results.row_table, 64),
        (windows.value_addresses(peer_R, place_R, 2, 9), windows.values.own, windows.values.table, 4),
    ):
        behind = 12 * size  # exchange 2 has the second slot, of 6 tokens' 2 results
        store, target = addresses.store_N.tolist(), addresses.target_N
        assert store[:2] == [int(table[1]) + behind + size * at for at in (4, 5)]
        # Here they follow one another, in rows of staging that begin with the ninth.
        assert [store[3] - store[2], store[4] - store[3]] == [size, size]
        there = [own.data_ptr() + behind + size * at for at in (0, 1, 7)]
        assert target is not None and target.tolist() == [0, 0, *there]
        assert addresses.network is windows.network and torch.equal(addresses.peer_N, peer_R)


def test_staging_has_room_for_all_chunks(windows: Windows) -> None:
    """As many rows as a rank can be sent, in chunks whose sizes are bounds (`Route._rows_of_chunks`)."""
    for degree in (1, 2, 3):
        chunk = (-(-ROOM.tokens * ROOM.slots // degree) + windows.experts) * 4
        peer_R = torch.full((chunk,), 3, dtype=torch.int32)
        for find, staged in (
            (windows.result_addresses, windows._staged_rows),
            (windows.value_addresses, windows._staged_values),
        ):
            last = find(peer_R, torch.arange(chunk), 1, chunk * (degree - 1)).store_N[-1]
            size = staged.shape[1] * staged.itemsize
            assert staged.data_ptr() <= int(last) <= staged.data_ptr() + staged.numel() * staged.itemsize - size


def test_far_peers_are_signalled_apart(windows: Windows) -> None:
    mark = windows.result_mark(2, 2)
    assert mark.signals is windows.results.signals and mark.place == (1 * 4 + 0) * 3 + 2
    own, near, *far = windows.result_signals(mark).tolist()
    assert [own, near] == [int(address) + 8 * mark.place for address in mark.table[:2]]
    assert windows.network is not None and far == [windows.network.spare.data_ptr()] * 2


def test_results_wait_for_credit_of_what_is_staged(windows: Windows) -> None:
    assert windows.results_behind(7) == 6
    plain = Windows(LocalHeap(0, 4, CPU, [], Job()), ROOM)
    assert plain.network is None and plain.results_behind(7) == 7 - SLOTS
    assert plain.tokens.staging is None and plain.letters.staging is None
    peer_R, place_R = torch.tensor([2], dtype=torch.int32), torch.tensor([3])
    sent = plain.result_addresses(peer_R, place_R, 1, 0)
    assert sent.target_N is None and sent.network is None
    assert sent.store_N.tolist() == [int(plain.results.row_table[2]) + 3 * 64]


def test_tokens_and_letters_have_staging_of_their_own(windows: Windows) -> None:
    for place in (windows.tokens, windows.letters):
        assert place.staging is not None and place.staging.shape == place.rows.shape
        assert place.staging.data_ptr() != place.rows.data_ptr() and place.network is windows.network
    assert windows.results.staging is None
