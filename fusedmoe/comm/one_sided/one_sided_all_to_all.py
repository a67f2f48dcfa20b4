"""All-to-all of bytes by one-sided puts, for sparse collectives of ranks with a symmetric heap.

A receive buffer of a fixed size is used in rounds, as many as the longest message of any two ranks needs, so that all
ranks count the same exchanges (`fusedmoe/kernels/triton/one_sided/remote.py` has the protocol).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.one_sided.receive_buffers import make_receive_buffer
from fusedmoe.comm.one_sided.watch import Watch
from fusedmoe.kernels.triton.one_sided.put import give_credit, put_rows
from fusedmoe.kernels.triton.one_sided.remote import wait_signals

# Elements of a row, of four bytes each; and rows for each peer in a round: a quarter of a MiB.
_WIDTH, _ROWS = 1024, 64
_ROW_BYTES = 4 * _WIDTH


class OneSidedAllToAll:
    """An all-to-all over a heap's group, with a receive buffer on every rank. Making it is collective.

    Args:
        rows: how many rows of 4 KiB each peer may have in the buffer at once.
    """

    def __init__(self, heap: Heap, rows: int = _ROWS) -> None:
        self.heap, self._rows = heap, rows
        self._place = make_receive_buffer(heap, (heap.group.size, rows, _WIDTH), torch.int32, rows, 1)
        self._watch = Watch(heap)
        self._epoch = 0

    def exchange(self, bytes_: Tensor, send: Sequence[int], recv: Sequence[int], most: int, operation: str) -> Tensor:
        """Sends `send[i]` bytes to the i-th rank and returns those received, in rank order. Collective.

        Args:
            bytes_: [sum(send)] uint8, ordered by destination.
            most: the most bytes that any rank sends another; the same number on all ranks.
        Raises:
            RankError: a rank failed or did not come.
        """
        place, size = self._place, self.heap.group.size
        self._watch.name(place.credits, operation, lambda index: (index, "the credit"))
        self._watch.name(place.signals, operation, lambda index: (index % size, "the experts"))
        rows_W = [_rows_of(count) for count in send]
        x = torch.zeros(sum(rows_W), _ROW_BYTES, dtype=torch.uint8, device=self.heap.device)
        starts = [sum(rows_W[:peer]) for peer in range(len(rows_W))]
        for start, part in zip(starts, bytes_.split(list(send)), strict=True):
            x.view(-1)[start * _ROW_BYTES : start * _ROW_BYTES + len(part)] = part
        words = x.view(torch.int32)
        received: list[list[Tensor]] = [[] for _ in recv]
        # All ranks make as many rounds, also with nothing to send: signals and credits count exchanges.
        for done in range(0, _rows_of(most), self._rows):
            self._round(words, starts, [rows - done for rows in rows_W], done)
            rows = self._place.rows[self._place.slot(self._epoch)]
            for peer, count in enumerate(recv):
                arrived = min(max(0, _rows_of(count) - done), self._rows)
                received[peer].append(rows[peer, :arrived].reshape(-1).view(torch.uint8).clone())
            give_credit(self._place, self._epoch)
        parts = [torch.cat(rounds)[:count] for rounds, count in zip(received, recv, strict=True) if count]
        return torch.cat(parts) if parts else bytes_.new_empty(0)

    def _round(self, words: Tensor, starts: Sequence[int], left: Sequence[int], done: int) -> None:
        """Puts the next rows of each message, and waits for those of the peers."""
        place, device = self._place, self.heap.device
        self._epoch += 1
        bounds = self._watch.bounds
        used_W = torch.tensor([min(max(0, rows), self._rows) for rows in left], dtype=torch.int32, device=device)
        first_W1 = torch.tensor(starts, dtype=torch.int32, device=device)[:, None] + done
        source_WC = first_W1 + torch.arange(self._rows, dtype=torch.int32, device=device)
        with self._watch.over():
            put_rows(words, source_WC, used_W, place, self._epoch, bounds)
        slot, size = place.slot(self._epoch), self.heap.group.size
        index_W = slot * size + torch.arange(size, dtype=torch.int32, device=device)
        with self._watch.over():
            wait_signals(place.signals, index_W, self._epoch, bounds, place.network)


def _rows_of(count: int) -> int:
    return -(-count // _ROW_BYTES)
