"""Receive buffers: kernels of a rank's peers put tokens, routing metadata and results there, and experts that move.

Exchanges use two slots in turn, so that one can begin while the one before is still read; a peer that is further behind
is waited for (`fusedmoe/kernels/triton/one_sided/remote.py` has the protocol). The host only chooses slots: what counts
a slot's exchanges is on the device, so that a CUDA graph may hold any of them, and begin where the last replay ended.

Where a peer is far, staging buffers hold rows that are on their way to it. A rank's results for all ranks' tokens may
be many: their staging holds one exchange, and so they have one slot: a new one waits until peers have read the one
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.heap import Heap, Watch
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import require_floats
from fusedmoe.kernels.one_sided import MOST_FAULTS, Bounds, Faults, Mark, ReceiveBuffer, ReturnRows
from fusedmoe.kernels.triton.one_sided.put import SentRows, give_credit, put_rows
from fusedmoe.kernels.triton.one_sided.remote import wait_signals

#: Exchanges that may be under way at once.
SLOTS = 2

# Rows that share one signal: of tokens as many as a tile of the product has, of metadata more, since they are short.
TOKEN_TILE, _METADATA_TILE = 128, 1024


@dataclass(frozen=True)
class BufferSizes:
    """The room of receive buffers; the same on all ranks.

    Attributes:
        tokens: the most that any rank has at once.   k: experts of a token.   experts: number on all ranks.
        width: elements of a row.   dtype: of rows.   degree: the most chunks.
    """

    tokens: int
    k: int
    experts: int
    width: int
    dtype: torch.dtype
    degree: int = 8


class ReceiveBuffers:
    """The receive buffers of one rank, for all layers of one shape. Making them is collective over the heap's group.

    Attributes:
        tokens, metadata: rows that peers send here to be computed, and the experts they are for.
        results: rows that peers send back, [slots, 1, tokens·K, width], with a signal for each peer and chunk.
        returned, returned_values: where results go, and a float32 number with each: [slots, tokens·K, width or 1].
        network: leads to far peers; None where no peer is far.
        watch: bounds waits.   faults: what ranks find wrong in a pass, and tell each other.
        token_rows, token_signals, metadata_lines, result_rows, value_rows: those of each slot, as kernels take them.
        done: [1] int32, 0 between launches that count their programs (`receive`).
        credit_W: of each slot of results, int32, indices of the peers' credits.
    """

    def __init__(self, heap: Heap, sizes: BufferSizes) -> None:
        self.heap, self.sizes, self.network = heap, sizes, heap.network
        size = heap.group.size
        require_floats("ReceiveBuffers", sizes.dtype)
        if sizes.experts % size:
            raise ConfigError(f"{sizes.experts} experts cannot be shared evenly by {size} ranks")
        self.experts = sizes.experts // size
        self._tile = min(TOKEN_TILE, 1 << max(4, (sizes.tokens - 1).bit_length()))
        tiles, lines = -(-max(sizes.tokens, 1) // self._tile), self.experts + sizes.tokens * sizes.k
        if self.experts > _METADATA_TILE:
            text = f"{self.experts} experts a rank are too many"
            raise ConfigError(f"{text}: routing metadata has room for {_METADATA_TILE}")
        tokens = size, tiles * self._tile, sizes.width
        self.tokens = make_receive_buffer(heap, tokens, sizes.dtype, self._tile, tiles)
        # A line for each local expert's count, then one for each row; one signal for each tile of lines.
        parts = -(-lines // _METADATA_TILE)
        metadata = size, parts * _METADATA_TILE, 2
        self.metadata = make_receive_buffer(heap, metadata, torch.int32, _METADATA_TILE, parts)
        results = max(1, sizes.tokens * sizes.k)
        slots = SLOTS if self.network is None else 1
        self.results = make_receive_buffer(heap, (1, results, sizes.width), sizes.dtype, 0, sizes.degree, slots)
        values = heap.allocate((slots, results, 1), torch.float32)
        staged_rows = staged_values = None
        if self.network is not None:
            # In chunks whose sizes are bounds, as `Route` reckons, and `read_metadata` rounds them up.
            most = size * (sizes.tokens * sizes.k + sizes.degree * (1 + self.experts)) + 3 * sizes.degree
            staged_rows = heap.allocate((most, sizes.width), sizes.dtype).own
            staged_values = heap.allocate((most, 1), torch.float32).own
        self.returned = ReturnRows(self.results.rows[:, 0], self.results.row_table, staged_rows, self.network)
        self.returned_values = ReturnRows(values.own, values.table, staged_values, self.network)
        self.done = torch.tensor([0], dtype=torch.int32, device=heap.device)
        self._make_views()
        self.watch = Watch(heap)
        told, own = heap.allocate((size,), torch.int64), torch.tensor([0], dtype=torch.int64, device=heap.device)
        self.faults = Faults(own, told.own, told.table, self.watch.bounds)
        for place, putting, waiting, part in (
            (self.metadata, "dispatch", "dispatch", "part {} of the routing metadata"),
            (self.tokens, "dispatch", "experts", "tile {} of the tokens"),
            (self.results, "combine", "combine", "chunk {} of the results"),
        ):
            self.watch.name(place.credits, putting, lambda index: (index % size, "the credit"))
            count, parts = place.signals[0].numel(), place.signals.shape[2]
            for signals in place.signals:  # kernels get those of one slot, or of all
                self.watch.name(signals, waiting, partial(_name, count, parts, part))
        self._turns = {id(place): cycle(range(place.slots)) for place in (self.tokens, self.metadata, self.results)}

    def _make_views(self) -> None:
        """Makes what every batch reads, slot by slot, once: views and small tables.

        All of these, for what is first made while a CUDA graph is captured is not there before it is replayed.
        """
        device, degree, place = self.heap.device, self.sizes.degree, self.results
        self.token_rows = self.tokens.rows.flatten(1, 2).unbind()
        self.token_signals = self.tokens.signals.unbind()
        self.metadata_lines = self.metadata.rows.unbind()
        self.result_rows, self.value_rows = self.returned.own.unbind(), self.returned_values.own[..., 0].unbind()
        size = self.heap.group.size
        starts = range(0, place.slots * size, size)
        self.credit_W = [torch.arange(at, at + size, dtype=torch.int32, device=device) for at in starts]
        # By number of the signal, and by slot and number of chunks.
        self._signals: dict[int, Tensor] = {}
        self._awaited: dict[tuple[int, int], Tensor] = {}
        for slot, credit_W in enumerate(self.credit_W):
            for chunk in range(degree):
                mark = self.result_mark(chunk, slot).place
                signal_W = place.signal_table + mark * 8
                if self.network is not None:
                    signal_W = torch.where(place.signal_table == 0, self.network.spare.data_ptr(), signal_W)
                self._signals[mark] = signal_W
                chunk_D = torch.arange(chunk + 1, dtype=torch.int32, device=device)
                self._awaited[slot, chunk + 1] = (credit_W[:, None] * degree + chunk_D).reshape(-1)

    def begin(self, place: ReceiveBuffer) -> int:
        """Returns the slot of the exchange that begins in one of the buffers."""
        return next(self._turns[id(place)])

    @property
    def bounds(self) -> Bounds:
        return self.watch.bounds

    def note(self, count: Tensor, fault: str) -> None:
        """Has all ranks end with an error, later, where `count` is not 0; no host synchronisation.

        Args:
            count: an integer scalar on the heap's device.
            fault: what is wrong, behind how many; the same on all ranks.
        """
        own, number = self.faults.own, self.watch.number(fault)
        own.copy_(torch.where(count > 0, (number << 32) + count.clamp(max=MOST_FAULTS), own))

    def refuse(self, tokens: int, k: int, degree: int, dtype: torch.dtype, width: int) -> None:
        """Raises `ConfigError` where the buffers have no room for a batch, before anything is sent."""
        sizes = self.sizes
        for name, has in (("tokens", tokens), ("k", k), ("degree", degree)):
            if has > (most := getattr(sizes, name)):
                room = f"more than the receive buffers have room for ({name}={most})"
                raise ConfigError(f"{name}={has} is {room}; make them larger")
        if (dtype, width) != (sizes.dtype, sizes.width):
            raise ConfigError(f"rows of {width} × {dtype} do not fit receive buffers of {sizes.width} × {sizes.dtype}")

    def result_mark(self, chunk: int, slot: int) -> Mark:
        """Returns this rank's signal at each peer that a chunk's results have arrived."""
        place = self.results
        index = (slot * self.heap.group.size + place.me) * self.sizes.degree + chunk
        return Mark(place.signals, index, place.signal_table)

    def result_signals(self, mark: Mark) -> Tensor:
        """Returns the signal's address at each peer, [W]; at far peers that of a spare one of this rank."""
        return self._signals[mark.place]

    def awaited_results(self, degree: int, slot: int) -> Tensor:
        """Returns indices of the signals that all results have arrived, int32."""
        return self._awaited[slot, degree]


def make_receive_buffer(
    heap: Heap, shape: tuple[int, int, int], dtype: torch.dtype, tile: int, signals: int, slots: int = SLOTS
) -> ReceiveBuffer:
    """Makes a buffer of [slots, *shape] on every rank; each peer has `signals` signals for its rows. Collective."""
    size = heap.group.size
    rows = heap.allocate((slots, *shape), dtype)
    signal, credit = heap.allocate((slots, size, signals), torch.int64), heap.allocate((slots, size), torch.int64)
    staging = heap.allocate((slots, *shape), dtype).own if tile and heap.network is not None else None
    own_signal, own_credit = (signal.own, signal.table), (credit.own, credit.table)
    epochs = [torch.tensor([1] * size, dtype=torch.int64, device=heap.device) for _ in range(slots)]
    me, network = heap.group.index, heap.network
    return ReceiveBuffer(rows.own, rows.table, *own_signal, tile, *own_credit, epochs, me, network, staging)


def _name(count: int, parts: int, words: str, index: int) -> tuple[int, str]:
    """Returns the peer of a signal (`count` in a slot, `parts` for each peer), and the words for its rows."""
    peer, part = divmod(index % count, parts)
    return peer, words.format(part)


# Of experts that move: elements of a row, of four bytes each, and rows for each peer in a round, a quarter of a MiB.
_WIDTH, _ROWS = 1024, 64
_ROW_BYTES = 4 * _WIDTH


class OneSidedAllToAll:
    """An all-to-all of bytes by one-sided puts, for sparse collectives over a heap's group. Making it is collective.

    Args:
        rows: how many rows of 4 KiB each peer may have in the buffer at once.
    """

    def __init__(self, heap: Heap, rows: int = _ROWS) -> None:
        self.heap, self._rows = heap, rows
        self._place = make_receive_buffer(heap, (heap.group.size, rows, _WIDTH), torch.int32, rows, 1)
        self._watch = Watch(heap)
        self._turns = cycle(range(self._place.slots))

    def exchange(self, bytes_: Tensor, send: Sequence[int], recv: Sequence[int], most: int, operation: str) -> Tensor:
        """Sends `send[i]` bytes to the i-th rank and returns those received, in rank order. Collective.

        Args:
            bytes_: [sum(send)] uint8, ordered by destination.
            most: the most bytes that any rank sends another; the same number on all ranks.
        Raises:
            RankError: a rank failed or did not come.
        """
        place, size = self._place, self.heap.group.size
        self._watch.name(place.credits, operation, lambda index: (index % size, "the credit"))
        self._watch.name(place.signals, operation, lambda index: (index % size, "the experts"))
        rows_W = [_rows_of(count) for count in send]
        x = torch.zeros(sum(rows_W), _ROW_BYTES, dtype=torch.uint8, device=self.heap.device)
        starts = [sum(rows_W[:peer]) for peer in range(len(rows_W))]
        for start, part in zip(starts, bytes_.split(list(send)), strict=True):
            x.view(-1)[start * _ROW_BYTES : start * _ROW_BYTES + len(part)] = part
        words = x.view(torch.int32)
        received: list[list[Tensor]] = [[] for _ in recv]
        # As many rounds as the longest message of any two ranks needs: signals and credits count exchanges, so all
        # ranks make them all, also with nothing to send.
        for done in range(0, _rows_of(most), self._rows):
            slot = next(self._turns)
            self._round(words, starts, [rows - done for rows in rows_W], done, slot)
            rows = place.rows[slot]
            for peer, count in enumerate(recv):
                arrived = min(max(0, _rows_of(count) - done), self._rows)
                received[peer].append(rows[peer, :arrived].reshape(-1).view(torch.uint8).clone())
            give_credit(place, slot)
        parts = [torch.cat(rounds)[:count] for rounds, count in zip(received, recv, strict=True) if count]
        return torch.cat(parts) if parts else bytes_.new_empty(0)

    def _round(self, words: Tensor, starts: Sequence[int], left: Sequence[int], done: int, slot: int) -> None:
        """Puts the next rows of each message, and waits for those of the peers."""
        place, device = self._place, self.heap.device
        bounds = self._watch.bounds
        used_W = torch.tensor([min(max(0, rows), self._rows) for rows in left], dtype=torch.int32, device=device)
        first_W1 = torch.tensor(starts, dtype=torch.int32, device=device)[:, None] + done
        source_WC = first_W1 + torch.arange(self._rows, dtype=torch.int32, device=device)
        with self._watch.over():
            put_rows(bounds, SentRows(words, source_WC, used_W, place, slot))
        size = self.heap.group.size
        index_W = slot * size + torch.arange(size, dtype=torch.int32, device=device)
        with self._watch.over():
            wait_signals(place.signals, index_W, place.epochs[slot], bounds, place.network)


def _rows_of(count: int) -> int:
    return -(-count // _ROW_BYTES)
