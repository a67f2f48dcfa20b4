"""The receive buffers of one-sided dispatch: kernels of a rank's peers put tokens, routing metadata and results there.

Each exchange has the next number and uses the next of two slots, so that one can begin while the one before is still
read; a peer that is further behind is waited for (`fusedmoe/kernels/triton/one_sided/remote.py` has the protocol).

Where a peer is far, staging buffers hold rows that are on their way to it. A rank's results for all ranks' tokens may
be many: their staging holds one exchange, so that a new one waits until peers have read the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fusedmoe.comm.one_sided.heap import Heap, Symmetric
from fusedmoe.comm.one_sided.watch import Watch
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.one_sided import Addresses, Bounds, Mark, ReceiveBuffer

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
        values: [slots, tokens·K] float32, a number with each result.
        network: leads to far peers; None where no peer is far.
        watch: bounds waits.
    Raises:
        ConfigError: experts that the ranks cannot share evenly.
    """

    def __init__(self, heap: Heap, sizes: BufferSizes) -> None:
        self.heap, self.sizes, self.network = heap, sizes, heap.network
        size = heap.group.size
        if sizes.experts % size:
            raise ConfigError(f"{sizes.experts} experts cannot be shared evenly by {size} ranks")
        self.experts = sizes.experts // size
        self._tile = min(TOKEN_TILE, 1 << max(4, (sizes.tokens - 1).bit_length()))
        capacity, lines = _up(max(sizes.tokens, 1), self._tile), self.experts + sizes.tokens * sizes.k
        if self.experts > _METADATA_TILE:
            raise ConfigError(
                f"{self.experts} experts a rank are too many: routing metadata has room for {_METADATA_TILE}"
            )
        self.tokens = make_receive_buffer(
            heap, (size, capacity, sizes.width), sizes.dtype, self._tile, capacity // self._tile
        )
        # A line for each local expert's count, then one for each row; one signal for each tile of lines.
        lines = _up(lines, _METADATA_TILE)
        self.metadata = make_receive_buffer(
            heap, (size, lines, 2), torch.int32, _METADATA_TILE, lines // _METADATA_TILE
        )
        results = max(1, sizes.tokens * sizes.k)
        self.results = make_receive_buffer(heap, (1, results, sizes.width), sizes.dtype, 0, sizes.degree)
        self.values = heap.allocate((SLOTS, results), torch.float32)
        if self.network is not None:
            # In chunks whose sizes are bounds, as `Route` reckons.
            most = size * (sizes.tokens * sizes.k + sizes.degree * (1 + self.experts))
            self._staged_rows = heap.allocate((most, sizes.width), sizes.dtype).own
            self._staged_values = heap.allocate((most, 1), torch.float32).own
        self.watch = Watch(heap)
        for place, putting, waiting, part in (
            (self.metadata, "dispatch", "dispatch", "part {} of the routing metadata"),
            (self.tokens, "dispatch", "experts", "tile {} of the tokens"),
            (self.results, "combine", "combine", "chunk {} of the results"),
        ):
            self.watch.name(place.credits, putting, lambda index: (index, "the credit"))
            count, parts = place.signals[0].numel(), place.signals.shape[2]
            self.watch.name(place.signals, waiting, partial(_name, count, parts, part))
        self._epochs = {id(place): 0 for place in (self.tokens, self.metadata, self.results)}

    def begin(self, place: ReceiveBuffer) -> int:
        """Returns the number of the exchange that begins in one of the buffers."""
        self._epochs[id(place)] += 1
        return self._epochs[id(place)]

    @property
    def bounds(self) -> Bounds:
        return self.watch.bounds

    def refuse(self, tokens: int, k: int, degree: int, dtype: torch.dtype, width: int) -> None:
        """Raises where the buffers have no room for a batch, before anything is sent.

        Raises:
            ConfigError: the batch does not fit; it says what to do.
        """
        sizes = self.sizes
        for name, has, most in (
            ("tokens", tokens, sizes.tokens),
            ("k", k, sizes.k),
            ("degree", degree, sizes.degree),
        ):
            if has > most:
                raise ConfigError(
                    f"{name}={has} is more than the receive buffers have room for ({name}={most}); make them larger"
                )
        if (dtype, width) != (sizes.dtype, sizes.width):
            raise ConfigError(f"rows of {width} × {dtype} do not fit receive buffers of {sizes.width} × {sizes.dtype}")

    def results_behind(self, epoch: int) -> int:
        """Returns the last exchange of results that peers must have read before results of this one are put."""
        return epoch - (SLOTS if self.network is None else 1)

    def result_addresses(self, peer_R: Tensor, place_R: Tensor, epoch: int, first: int) -> Addresses:
        """Returns addresses of results at their tokens' ranks; for far peers, in staging from row `first` on."""
        rows = self.results.rows
        target_R = (self.results.slot(epoch) * rows.shape[2] + place_R) * (rows.shape[3] * rows.itemsize)
        staged = None if self.network is None else self._staged_rows[first:]
        return self._addresses(rows, self.results.row_table, peer_R, target_R, staged)

    def value_addresses(self, peer_R: Tensor, place_R: Tensor, epoch: int, first: int) -> Addresses:
        """Returns addresses of the number that goes with each result, as `result_addresses` does of the results."""
        own, table = self.values.own, self.values.table
        target_R = (self.results.slot(epoch) * own.shape[1] + place_R) * own.itemsize
        staged = None if self.network is None else self._staged_values[first:]
        return self._addresses(own, table, peer_R, target_R, staged)

    def _addresses(
        self, own: Tensor, table: Tensor, peer_R: Tensor, target_R: Tensor, staged: Tensor | None
    ) -> Addresses:
        """Returns addresses `target_R` bytes into the peers' copies of an allocation; for far peers, in staging."""
        base_R = table[peer_R.long()]
        store_R = base_R + target_R
        if staged is None:
            return Addresses(peer_R, store_R)
        row_R = torch.arange(peer_R.numel(), device=peer_R.device)
        staged_R = staged.data_ptr() + row_R * (staged.shape[1] * staged.itemsize)
        far_R = base_R == 0  # no address of theirs leads there
        target_R = torch.where(far_R, own.data_ptr() + target_R, 0)
        return Addresses(peer_R, torch.where(far_R, staged_R, store_R), target_R, self.network)

    def result_mark(self, chunk: int, epoch: int) -> Mark:
        """Returns this rank's signal at each peer that a chunk's results have arrived."""
        place = self.results
        index = (place.slot(epoch) * self.heap.group.size + place.me) * self.sizes.degree + chunk
        return Mark(place.signals, index, place.signal_table)

    def result_signals(self, mark: Mark) -> Tensor:
        """Returns the signal's address at each peer, [W]; at far peers that of a spare one of this rank."""
        signal_W = mark.table + mark.place * 8
        if self.network is None:
            return signal_W
        return torch.where(mark.table == 0, self.network.spare.data_ptr(), signal_W)

    def awaited_results(self, degree: int, epoch: int) -> Tensor:
        """Returns indices of the signals that all results have arrived, int32."""
        size = self.heap.group.size
        peer_W1 = torch.arange(size, dtype=torch.int32, device=self.heap.device)[:, None]
        chunk = torch.arange(degree, dtype=torch.int32, device=self.heap.device)
        return ((self.results.slot(epoch) * size + peer_W1) * self.sizes.degree + chunk).reshape(-1)


def make_receive_buffer(
    heap: Heap, shape: tuple[int, int, int], dtype: torch.dtype, tile: int, signals: int
) -> ReceiveBuffer:
    """Makes a buffer of [slots, *shape] on every rank; each peer has `signals` signals for its rows. Collective."""
    size = heap.group.size

    def allocate(*shape: int, dtype: torch.dtype = torch.int64) -> Symmetric:
        return heap.allocate(shape, dtype)

    rows, signal, credit = allocate(SLOTS, *shape, dtype=dtype), allocate(SLOTS, size, signals), allocate(size)
    staging = allocate(SLOTS, *shape, dtype=dtype).own if tile and heap.network is not None else None
    return ReceiveBuffer(
        rows.own,
        rows.table,
        signal.own,
        signal.table,
        tile,
        credit.own,
        credit.table,
        heap.group.index,
        heap.network,
        staging,
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _name(count: int, parts: int, words: str, index: int) -> tuple[int, str]:
    """Returns the peer of a signal (`count` in a slot, `parts` for each peer), and the words for its rows."""
    peer, part = divmod(index % count, parts)
    return peer, words.format(part)
