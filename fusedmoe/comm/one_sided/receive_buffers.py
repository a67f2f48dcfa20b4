"""Receive buffers, into which the kernels of peers put tokens, routing metadata, results and migrating experts.

Exchanges alternate between two slots, so one can start while the previous one is still being read (protocol:
`fusedmoe/kernels/triton/one_sided/remote.py`). The host only selects slots; each slot's count of exchanges is on the
device, so CUDA graphs can contain any exchanges.

Rows for remote peers are staged in local buffers. Results then have one slot, because one rank's results for all ranks'
tokens can be large: a new exchange waits until peers have read the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.heap import Heap, SignalWatch
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import require_float_dtype
from fusedmoe.kernels.one_sided import MAX_FAULT_COUNT, Bounds, Faults, PeerSignal, ReceiveBuffer, ReturnBuffers
from fusedmoe.kernels.triton.one_sided.put import SentRows, give_credit, put_rows
from fusedmoe.kernels.triton.one_sided.remote import wait_signals

#: Maximum number of concurrent exchanges.
SLOTS = 2

# Rows per signal: for tokens the tile of the grouped GEMM; more for the short rows of metadata.
TOKEN_TILE, _METADATA_TILE_ROWS = 128, 1024


@dataclass(frozen=True)
class BufferSizes:
    """Capacity of receive buffers; the same on all ranks.

    Attributes:
        tokens: maximum tokens per rank.
        experts: number of experts over all ranks.
        degree: maximum number of chunks.
    """

    tokens: int
    k: int
    experts: int
    width: int
    dtype: torch.dtype
    degree: int = 8


class ReceiveBuffers:
    """Receive buffers of one rank, shared by all layers of one shape. The constructor is collective over the group.

    Attributes:
        tokens, metadata: rows that peers put here for this rank's experts, and their expert assignments.
        results: rows that peers return, [slots, 1, tokens·K, width], with one signal per peer and chunk.
        returned, value_return_buffers: symmetric memory of results, [slots, tokens·K, width], and a float32 for each.
        faults: faults that ranks detect in a pass and send to each other.
        token_rows, token_signals, metadata_lines, result_rows, value_rows: views of each slot.
        num_finished: [1] int32, counts finished programs of a launch (`receive`); 0 between launches.
        credit_W: per slot of results, int32 indices of the peers' credits.
    """

    def __init__(self, heap: Heap, sizes: BufferSizes) -> None:
        self.heap, self.sizes, self.network = heap, sizes, heap.network
        size = heap.group.size
        require_float_dtype("ReceiveBuffers", sizes.dtype)
        if sizes.experts % size:
            raise ConfigError(f"{sizes.experts} experts cannot be shared evenly by {size} ranks")
        self.experts = sizes.experts // size
        self._token_tile_rows = min(TOKEN_TILE, 1 << max(4, (sizes.tokens - 1).bit_length()))
        tiles, lines = -(-max(sizes.tokens, 1) // self._token_tile_rows), self.experts + sizes.tokens * sizes.k
        if self.experts > _METADATA_TILE_ROWS:
            text = f"{self.experts} experts a rank are too many"
            raise ConfigError(f"{text}: routing metadata has room for {_METADATA_TILE_ROWS}")
        tokens = size, tiles * self._token_tile_rows, sizes.width
        self.tokens = make_receive_buffer(heap, tokens, sizes.dtype, self._token_tile_rows, tiles)
        # One row per local expert's count, then one per pair; one signal per tile of rows.
        parts = -(-lines // _METADATA_TILE_ROWS)
        metadata = size, parts * _METADATA_TILE_ROWS, 2
        self.metadata = make_receive_buffer(heap, metadata, torch.int32, _METADATA_TILE_ROWS, parts)
        results = max(1, sizes.tokens * sizes.k)
        slots = SLOTS if self.network is None else 1
        self.results = make_receive_buffer(heap, (1, results, sizes.width), sizes.dtype, 0, sizes.degree, slots)
        values = heap.allocate((slots, results, 1), torch.float32)
        row_staging = value_staging = None
        if self.network is not None:
            # Upper bound over chunks, as in `Route`; `read_metadata` rounds chunk sizes up.
            staging_rows = size * (sizes.tokens * sizes.k + sizes.degree * (1 + self.experts)) + 3 * sizes.degree
            row_staging = heap.allocate((staging_rows, sizes.width), sizes.dtype).own
            value_staging = heap.allocate((staging_rows, 1), torch.float32).own
        self.returned = ReturnBuffers(self.results.rows[:, 0], self.results.row_table, row_staging, self.network)
        self.value_return_buffers = ReturnBuffers(values.own, values.table, value_staging, self.network)
        self.num_finished = torch.tensor([0], dtype=torch.int32, device=heap.device)
        self._make_slot_views()
        self.watch = SignalWatch(heap)
        received, own = heap.allocate((size,), torch.int64), torch.tensor([0], dtype=torch.int64, device=heap.device)
        self.faults = Faults(own, received.own, received.table, self.watch.bounds)
        for buffer, putting, waiting, part in (
            (self.metadata, "dispatch", "dispatch", "part {} of the routing metadata"),
            (self.tokens, "dispatch", "experts", "tile {} of the tokens"),
            (self.results, "combine", "combine", "chunk {} of the results"),
        ):
            self.watch.name_signals(buffer.credits, putting, lambda index: (index % size, "the credit"))
            count, parts = buffer.signals[0].numel(), buffer.signals.shape[2]
            for signals in buffer.signals:  # kernels receive the signals of one slot or of all
                self.watch.name_signals(signals, waiting, partial(_describe_signal, count, parts, part))
        self._slot_cycles = {
            id(buffer): cycle(range(buffer.slots)) for buffer in (self.tokens, self.metadata, self.results)
        }

    def _make_slot_views(self) -> None:
        """Create the views and the index tensors of every slot.

        Tensors created during CUDA graph capture would not exist before the first replay.
        """
        device, degree, buffer = self.heap.device, self.sizes.degree, self.results
        self.token_rows = self.tokens.rows.flatten(1, 2).unbind()
        self.token_signals = self.tokens.signals.unbind()
        self.metadata_lines = self.metadata.rows.unbind()
        self.result_rows, self.value_rows = self.returned.own.unbind(), self.value_return_buffers.own[..., 0].unbind()
        size = self.heap.group.size
        starts = range(0, buffer.slots * size, size)
        self.credit_W = [torch.arange(at, at + size, dtype=torch.int32, device=device) for at in starts]
        # Keyed by signal index, and by (slot, number of chunks).
        self._result_signal_addresses: dict[int, Tensor] = {}
        self._awaited_signal_indices: dict[tuple[int, int], Tensor] = {}
        for slot, credit_W in enumerate(self.credit_W):
            for chunk in range(degree):
                signal = self.result_signal(chunk, slot).signal_index
                signal_W = buffer.signal_table + signal * 8
                if self.network is not None:
                    signal_W = torch.where(buffer.signal_table == 0, self.network.dummy_signal.data_ptr(), signal_W)
                self._result_signal_addresses[signal] = signal_W
                chunk_D = torch.arange(chunk + 1, dtype=torch.int32, device=device)
                self._awaited_signal_indices[slot, chunk + 1] = (credit_W[:, None] * degree + chunk_D).reshape(-1)

    def next_slot(self, buffer: ReceiveBuffer) -> int:
        return next(self._slot_cycles[id(buffer)])

    @property
    def bounds(self) -> Bounds:
        return self.watch.bounds

    def record_fault(self, count: Tensor, fault: str) -> None:
        """Record a fault if `count` is nonzero. All ranks raise it at a later check. Does not synchronize.

        Args:
            count: integer scalar on the heap's device.
            fault: error text after the count; the same on all ranks.
        """
        own, number = self.faults.own, self.watch.fault_number(fault)
        own.copy_(torch.where(count > 0, (number << 32) + count.clamp(max=MAX_FAULT_COUNT), own))

    def check_batch(self, tokens: int, k: int, degree: int, dtype: torch.dtype, width: int) -> None:
        sizes = self.sizes
        for name, has in (("tokens", tokens), ("k", k), ("degree", degree)):
            if has > (capacity := getattr(sizes, name)):
                room = f"more than the receive buffers have room for ({name}={capacity})"
                raise ConfigError(f"{name}={has} is {room}; make them larger")
        if (dtype, width) != (sizes.dtype, sizes.width):
            raise ConfigError(f"rows of {width} × {dtype} do not fit receive buffers of {sizes.width} × {sizes.dtype}")

    def result_signal(self, chunk: int, slot: int) -> PeerSignal:
        """Return the signal, at each peer, that reports a chunk's results from this rank."""
        buffer = self.results
        index = (slot * self.heap.group.size + buffer.me) * self.sizes.degree + chunk
        return PeerSignal(buffer.signals, index, buffer.signal_table)

    def result_signal_addresses(self, signal: PeerSignal) -> Tensor:
        """Return the signal's address at each peer, [W]; for remote peers, of an unused local signal."""
        return self._result_signal_addresses[signal.signal_index]

    def result_signal_indices(self, degree: int, slot: int) -> Tensor:
        return self._awaited_signal_indices[slot, degree]


def make_receive_buffer(
    heap: Heap, shape: tuple[int, int, int], dtype: torch.dtype, tile: int, signals: int, slots: int = SLOTS
) -> ReceiveBuffer:
    """Make a buffer of [slots, *shape] on every rank, with `signals` signals per peer. Collective."""
    size = heap.group.size
    rows = heap.allocate((slots, *shape), dtype)
    signal, credit = heap.allocate((slots, size, signals), torch.int64), heap.allocate((slots, size), torch.int64)
    staging = heap.allocate((slots, *shape), dtype).own if tile and heap.network is not None else None
    own_signal, own_credit = (signal.own, signal.table), (credit.own, credit.table)
    epochs = [torch.tensor([1] * size, dtype=torch.int64, device=heap.device) for _ in range(slots)]
    me, network = heap.group.index, heap.network
    return ReceiveBuffer(rows.own, rows.table, *own_signal, tile, *own_credit, epochs, me, network, staging)


def _describe_signal(count: int, parts: int, words: str, index: int) -> tuple[int, str]:
    peer, part = divmod(index % count, parts)
    return peer, words.format(part)


# Migrating experts: int32 elements per row, and rows per peer and round (256 KiB).
_WORDS_PER_ROW, _ROWS_PER_ROUND = 1024, 64
_BYTES_PER_ROW = 4 * _WORDS_PER_ROW


class OneSidedAllToAll:
    """All-to-all of bytes by one-sided puts, for sparse collectives. The constructor is collective.

    `rows`: rows of 4 KiB that each peer may have in the buffer at once.
    """

    def __init__(self, heap: Heap, rows: int = _ROWS_PER_ROUND) -> None:
        self.heap, self._rows_per_round = heap, rows
        self._buffer = make_receive_buffer(heap, (heap.group.size, rows, _WORDS_PER_ROW), torch.int32, rows, 1)
        self._watch = SignalWatch(heap)
        self._slot_cycle = cycle(range(self._buffer.slots))

    def exchange(self, bytes_: Tensor, send: Sequence[int], recv: Sequence[int], limit: int, operation: str) -> Tensor:
        """Send `send[i]` bytes to the i-th rank and return the received bytes, in rank order. Collective.

        Args:
            bytes_: [sum(send)] uint8, ordered by destination.
            limit: largest number of bytes from any rank to another; the same on all ranks.
        Raises:
            RankError: a rank failed or did not join.
        """
        buffer, size = self._buffer, self.heap.group.size
        self._watch.name_signals(buffer.credits, operation, lambda index: (index % size, "the credit"))
        self._watch.name_signals(buffer.signals, operation, lambda index: (index % size, "the experts"))
        rows_W = [_num_rows_for_bytes(count) for count in send]
        x = torch.zeros(sum(rows_W), _BYTES_PER_ROW, dtype=torch.uint8, device=self.heap.device)
        starts = [sum(rows_W[:peer]) for peer in range(len(rows_W))]
        for start, part in zip(starts, bytes_.split(list(send)), strict=True):
            x.view(-1)[start * _BYTES_PER_ROW : start * _BYTES_PER_ROW + len(part)] = part
        words = x.view(torch.int32)
        received: list[list[Tensor]] = [[] for _ in recv]
        # All ranks run the rounds of the longest message: signals and credits count exchanges.
        for first in range(0, _num_rows_for_bytes(limit), self._rows_per_round):
            slot = next(self._slot_cycle)
            self._exchange_round(words, starts, [rows - first for rows in rows_W], first, slot)
            rows = buffer.rows[slot]
            for peer, count in enumerate(recv):
                arrived = min(max(0, _num_rows_for_bytes(count) - first), self._rows_per_round)
                received[peer].append(rows[peer, :arrived].reshape(-1).view(torch.uint8).clone())
            give_credit(buffer, slot)
        parts = [torch.cat(rounds)[:count] for rounds, count in zip(received, recv, strict=True) if count]
        return torch.cat(parts) if parts else bytes_.new_empty(0)

    def _exchange_round(self, words: Tensor, starts: Sequence[int], left: Sequence[int], first: int, slot: int) -> None:
        buffer, device = self._buffer, self.heap.device
        bounds = self._watch.bounds
        counts = [min(max(0, rows), self._rows_per_round) for rows in left]
        used_W = torch.tensor(counts, dtype=torch.int32, device=device)
        first_W1 = torch.tensor(starts, dtype=torch.int32, device=device)[:, None] + first
        source_WC = first_W1 + torch.arange(self._rows_per_round, dtype=torch.int32, device=device)
        with self._watch.guard_launches():
            put_rows(bounds, SentRows(words, source_WC, used_W, buffer, slot))
        size = self.heap.group.size
        index_W = slot * size + torch.arange(size, dtype=torch.int32, device=device)
        with self._watch.guard_launches():
            wait_signals(buffer.signals, index_W, buffer.epochs[slot], bounds, buffer.network)


def _num_rows_for_bytes(count: int) -> int:
    return -(-count // _BYTES_PER_ROW)
