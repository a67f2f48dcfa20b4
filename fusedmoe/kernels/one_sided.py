"""One-sided dispatch: data structures and row tables of kernels that write tokens directly to peer ranks' memory.

The sender writes each token once to every rank that hosts one of its experts, to a row of the receiver's buffer that
the sender selects. It also sends routing metadata, in lines of two int32. The first lines are, for each expert of the
receiver, the number of rows and the first row of their results at the sender. A line for each row follows: the buffer
row of its token, and its router weight. The receiver sorts rows by expert, source and sender order, as the collective
path does.

Example, two ranks of one expert each, one chunk: rank 0 has tokens a, b, c with experts {0, 1}, {1}, {1}. It puts a to
rank 0, and a, b, c to buffer rows 0, 1, 2 of rank 1. The metadata for rank 1 are: 3 rows of its expert, whose results
return to rows 1, 2, 3 of rank 0's results (row 0 belongs to expert 0); then buffer rows 0, 1, 2 with the weights.

With several chunks, tokens are ordered by the first chunk that needs them. If forward has r and backward r' chunks,
tokens ordered for lcm(r, r') chunks are in order for both.

A remote peer is a rank whose memory this GPU cannot address (on another node); all other peers are near. Rows for
remote peers are first stored in local NVSHMEM memory (staging) and then sent. Fields `network`, `staging` and
`target_N` are None without remote peers.

The references `define_…` do not synchronize with the device if the row counts that they receive are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, Tiles, offsets

# Record of a failed wait: reason, index of the signal, expected and seen value, address of the signals.
RECORD_SIZE = 5
# Reasons set by kernels; the host writes others to `stop`. A fault's record has the rank instead of the signal index,
# and the fault word (`Faults`) instead of the expected value.
TIMED_OUT, FAULT = 1, 4
MAX_FAULT_COUNT = 2**31 - 1


class Bounds(NamedTuple):
    """Limits of kernel waits: the flag that ends them, the record of a wait that failed, and the time limit."""

    stop: Tensor
    record: Tensor
    limit_ns: int


class Faults(NamedTuple):
    """Faults detected on devices during a pass, which all ranks receive at its end. A fault ends all waits.

    A fault word is 0, or a message number (`Watch.fault_number`) times 2³² plus a count.

    Attributes:
        own: [1] int64, this rank's word.
        received_W: [W] int64, words received from all ranks.
        table: [W] addresses of all ranks' copies of `received_W`.
    """

    own: Tensor
    received_W: Tensor
    table: Tensor
    bounds: Bounds


class RowLimit(NamedTuple):
    """Maximum rows that a rank's experts may receive. Beyond `max_rows`, `fault_word` is set to `message`."""

    max_rows: int
    fault_word: Tensor
    message: int


class Network(NamedTuple):
    """NVSHMEM access to remote peers.

    Attributes:
        pe_W: int32, PE (NVSHMEM's rank number) of each rank.
        dummy_signal: [1] int64 in symmetric memory; kernels write to it where a thread has no signal to set.
        libraries: bitcode to link with kernels.
    """

    pe_W: Tensor
    dummy_signal: Tensor
    libraries: Mapping[str, str]


def nvshmem_options(network: Network | None) -> dict[str, Any]:
    """Return the constexpr `NVSHMEM` of a kernel and, with a network, its launch options."""
    return {"NVSHMEM": False} if network is None else {"NVSHMEM": True, "extern_libs": dict(network.libraries)}


def network_pointers(network: Network | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if network is None else (network.pe_W, network.dummy_signal)


class ReceiveBuffer(NamedTuple):
    """A receive buffer as passed to kernels.

    Every rank has a copy of the buffer, to which its peers write. A copy has several slots; an exchange uses one of
    them. The exchanges in a slot are numbered from 1; the number is the slot's epoch.

    Attributes:
        rows: [slots, W, C, M], this rank's copy: C rows for each source rank; or [slots, 1, C, M] for a single source.
        row_table, signal_table, credit_table: [W], addresses of `rows`, `signals` and `credits` on every rank; 0 for
            remote peers.
        signals: [slots, W, T] int64: a source rank sets a signal to the epoch once the rows are written. T is C / tile
            if each tile of rows has a signal, else the number of signals per source rank.
        tile: rows per signal.
        credits: [slots, W] int64: per peer, the epoch of the last exchange of this rank that the peer has read from the
            slot. This rank writes to the slot again only after this credit.
        epochs: per slot [W] int64 in local memory: the number of the slot's current or next exchange, once for each
            peer, all equal between launches. The program that gives credit to a peer increments the entry of that peer.
        me: this rank's index.
        network: NVSHMEM access to remote peers; None without any.
        staging: [slots, W, C, M], outgoing rows for remote peers; None without any, or if rows are staged elsewhere.
    """

    rows: Tensor
    row_table: Tensor
    signals: Tensor
    signal_table: Tensor
    tile: int
    credits: Tensor
    credit_table: Tensor
    epochs: Sequence[Tensor]
    me: int
    network: Network | None = None
    staging: Tensor | None = None

    @property
    def slots(self) -> int:
        return self.rows.shape[0]

    @property
    def num_peers(self) -> int:
        return self.credits.shape[1]


class Addresses(NamedTuple):
    """Destination addresses of rows.

    Attributes:
        peer_N: int32, destination rank.
        store_N: int64, address to which the kernel stores the row: at a near peer, or in staging for a remote peer,
            where consecutive rows are adjacent.
        target_N: int64, for remote peers the row's destination as NVSHMEM expects it: the corresponding address in this
            rank's symmetric memory. 0 for near peers.
    """

    peer_N: Tensor
    store_N: Tensor
    target_N: Tensor | None = None
    network: Network | None = None


class PeerSignal(NamedTuple):
    """The signal that this rank sets at each peer: element `signal_index` of `signals`, at addresses `table` [W]."""

    signals: Tensor
    signal_index: int
    table: Tensor


class Put(NamedTuple):
    """Rows to write to other ranks' memory.

    Attributes:
        like: tensor of the rows' dtype.
        weight_N: factors of the rows; None for 1.
        num_rows_W: int32, number of rows for each peer.
        counter_W: int32, 0 before a launch, which counts the rows written for each peer.
        signal_W: int64, per peer the address of the signal to set to `epoch[0]` once all its rows are written. For
            remote peers an unused local signal; theirs are set with `peer_signal`.
        epoch: int64, number of the exchange.
    """

    like: Tensor
    addresses: Addresses
    weight_N: Tensor | None
    num_rows_W: Tensor
    counter_W: Tensor
    signal_W: Tensor
    epoch: Tensor
    peer_signal: PeerSignal


class Wait(NamedTuple):
    """Signals of a receive buffer that a kernel awaits before it reads rows; its `layout.source_N` lists the rows.

    Attributes:
        signals: [..., T] int64, one signal per `tile` rows, in the order of the buffer's rows.
        epoch: int64; the first element is the number of the exchange.
        by_arrival: each expert's rows are sorted by arrival (`define_arrivals`).
    """

    signals: Tensor
    tile: int
    epoch: Tensor
    bounds: Bounds
    network: Network | None = None
    by_arrival: bool = False


class Sends(NamedTuple):
    """Indices of the tokens, and the routing metadata, that a rank puts to its peers' receive buffers.

    Attributes:
        token_WC, token_used_W: int32, the token that is written to each row of a peer's buffer, and their number.
        metadata: [E + N, 2] int32, metadata lines for all peers.
        line_WC, line_used_W: int32, the lines in `metadata` that each peer receives, and their number.
    """

    token_WC: Tensor
    token_used_W: Tensor
    metadata: Tensor
    line_WC: Tensor
    line_used_W: Tensor


class Arrivals(NamedTuple):
    """Routing of one chunk of received rows, sorted by local expert, source, and sender order (`define_arrivals`).

    Attributes:
        layout: sorts the rows by expert; its `source_N` are rows of a buffer slot. May have padding.
        weight_R: float32 router weights.
        peer_R: int32, source rank of each row.
        result_row_R: int64, row of the source's result buffer that receives the result of each row.
        num_rows_W: int32, number of rows from each source.
    """

    layout: Layout
    weight_R: Tensor
    peer_R: Tensor
    result_row_R: Tensor
    num_rows_W: Tensor


class ReturnBuffers(NamedTuple):
    """Result buffers of all ranks, to which the experts' ranks write one result per row.

    Attributes:
        own: [slots, rows, width], this rank's buffer.
        table: [W] addresses of all ranks' buffers, 0 for remote peers.
        staging: [rows, width], outgoing rows for remote peers, of all chunks in order.
    """

    own: Tensor
    table: Tensor
    staging: Tensor | None = None
    network: Network | None = None

    @property
    def row_bytes(self) -> int:
        return self.own.shape[2] * self.own.itemsize


class ArrivedChunk(NamedTuple):
    """One chunk of received rows, and the destinations of its results.

    Attributes:
        results, values: per slot of the result buffer, the destinations of the rows' results, and of one scalar per row
            that is sent with them.
        counters: `Put.counter_W` of each pass.
        tiles: row tiles by tile height.
    """

    arrivals: Arrivals
    results: Sequence[Addresses]
    values: Sequence[Addresses]
    counters: Sequence[Tensor]
    tiles: Mapping[int, Tiles]


def chunk_of(row: Tensor, count: Tensor, degree: int) -> Tensor:
    """Return the chunk of row `row` among an expert's `count` rows; chunk j starts at row ⌊count·j/degree⌋."""
    return ((row + 1) * degree - 1).div(count.clamp(min=1), rounding_mode="floor").clamp(max=degree - 1)


def define_sends(
    layout: Layout, weight_SK: Tensor | None, num_ranks: int, degree: int, capacity: int, lines: int
) -> Sends:
    """Select the tokens that this rank puts to each peer, their order, and the routing metadata.

    Args:
        layout: this rank's tokens over all E experts; rank p hosts experts from p·E/num_ranks on.
        degree: number of chunks of the receivers; determines the token order.
        capacity, lines: rows per source rank in a peer's token buffer, and lines per source in its metadata buffer.
    """
    assert layout.source_N is not None
    device, num_tokens, num_rows = layout.counts_E.device, layout.tokens, layout.rows
    local = layout.experts // num_ranks
    row_N = torch.arange(num_rows, device=device)
    kept_N = row_N < layout.offsets_E1[-1]
    expert_N = torch.searchsorted(layout.offsets_E1[1:].contiguous(), row_N, right=True).clamp(max=layout.experts - 1)
    peer_N = expert_N // local
    chunk_N = chunk_of(row_N - layout.offsets_E1[expert_N], layout.counts_E[expert_N], degree)

    # First chunk that needs each (token, peer); `degree` if none does.
    pair_N = torch.where(kept_N, layout.source_N * num_ranks + peer_N, num_tokens * num_ranks)
    first = torch.full((num_tokens * num_ranks + 1,), degree, device=device).scatter_reduce(0, pair_N, chunk_N, "amin")
    first_SW = first[:-1].view(num_tokens, num_ranks)
    # Tiles of the first chunk are complete earliest.
    token_SW = first_SW.argsort(dim=0, stable=True)
    place_SW = torch.arange(num_tokens, device=device)[:, None].expand_as(token_SW)
    buffer_row_SW = torch.empty_like(token_SW).scatter_(0, token_SW, place_SW)
    token_WC = torch.zeros((num_ranks, capacity), dtype=torch.int32, device=device)
    token_WC[:, :num_tokens] = token_SW.t()

    start_E = layout.offsets_E1[:-1]
    head = torch.stack([layout.counts_E.to(torch.int32), start_E], 1)
    buffer_row_N = buffer_row_SW.view(-1)[pair_N.clamp(max=max(num_tokens * num_ranks - 1, 0))] if num_tokens else row_N
    weight = torch.ones(num_rows, device=device) if weight_SK is None else weight_SK.reshape(-1)[layout.pair_N].float()
    body = torch.stack([buffer_row_N.to(torch.int32), weight.contiguous().view(torch.int32)], 1)
    count_W = layout.counts_E.view(num_ranks, local).sum(1)
    line = torch.arange(lines, device=device)
    own_W1 = torch.arange(num_ranks, device=device)[:, None]
    line_WC = torch.where(
        line < local, own_W1 * local + line, layout.experts + start_E[::local][:, None] + line - local
    ).clamp(max=max(layout.experts + num_rows - 1, 0))
    return Sends(
        token_WC,
        (first_SW < degree).sum(0, dtype=torch.int32),
        torch.cat([head, body]),
        line_WC.to(torch.int32),
        (count_W + local).to(torch.int32),
    )


def define_arrivals(
    metadata_WC2: Tensor,
    experts: int,
    degree: int,
    capacity: int,
    rows: Sequence[int],
    arrival_tile: int | None = None,
) -> list[Arrivals]:
    """Decode the routing metadata into the routing of the received rows, chunk by chunk.

    Rows beyond a chunk's bound are dropped; no rank waits for their results.

    Args:
        metadata_WC2: int32, metadata lines received from all ranks.
        experts, degree: number of local experts, and of chunks.
        capacity: rows per source in a buffer slot.
        rows: row count of each chunk, or upper bounds.
        arrival_tile: None: each expert's rows are sorted by source and sender order. Otherwise they are sorted by
            expected arrival: by tile of this many tokens, then source, then sender order. Only for one chunk.
    """
    peers, device = metadata_WC2.shape[0], metadata_WC2.device
    counts_We, start_We = metadata_WC2[:, :experts, 0].long(), metadata_WC2[:, :experts, 1].long()
    before_We = counts_We.cumsum(1) - counts_We
    flat = metadata_WC2.view(peers * metadata_WC2.shape[1], 2)
    chunks = []
    for chunk, bound in enumerate(rows):
        skipped_We = counts_We * chunk // degree
        count_eW = (counts_We * (chunk + 1) // degree - skipped_We).t()
        end_G = count_eW.reshape(-1).cumsum(0).clamp(max=bound)
        count_eW = end_G.diff(prepend=end_G.new_zeros(1)).view(count_eW.shape)
        row_R = torch.arange(bound, device=device)
        # A group is the rows of one expert from one source; padding is assigned to the last group.
        group_R = torch.searchsorted(end_G, row_R, right=True).clamp(max=end_G.numel() - 1)
        position_R = row_R - (end_G - count_eW.reshape(-1))[group_R]
        expert_R, peer_R = group_R // peers, group_R % peers
        position_R = position_R + skipped_We[peer_R, expert_R]
        line_R = peer_R * metadata_WC2.shape[1] + experts + before_We[peer_R, expert_R] + position_R
        kept_R = row_R < end_G[-1]
        if arrival_tile is not None:
            tile_R = flat[torch.where(kept_R, line_R, 0), 0] // arrival_tile
            by_arrival = torch.where(
                kept_R, (expert_R * capacity + tile_R) * peers + peer_R, experts * capacity * peers
            )
            order_R = by_arrival.argsort(stable=True)
            expert_R, peer_R, position_R, line_R = (of[order_R] for of in (expert_R, peer_R, position_R, line_R))
        # Padding reads line 0 and gets source 0.
        line = flat[torch.where(kept_R, line_R, 0)]
        source_R = peer_R * capacity + torch.where(kept_R, line[:, 0].long(), 0)
        count_e = count_eW.sum(1)
        layout = Layout(count_e, offsets(count_e), source_R, row_R, row_R.view(-1, 1))
        weight_R = line[:, 1].contiguous().view(torch.float32)
        result_row_R = start_We[peer_R, expert_R] + position_R
        num_rows_W = count_eW.sum(0, dtype=torch.int32)
        chunks.append(Arrivals(layout, weight_R, peer_R.to(torch.int32), result_row_R, num_rows_W))
    return chunks


def define_addresses(peer_R: Tensor, result_row_R: Tensor, rows: ReturnBuffers, slot: int, first: int) -> Addresses:
    """Return the destination of each result row in its peer's result buffer (`rows`).

    `first`: row of the staging buffer from which the rows for remote peers are stored.
    """
    base_R, target_R = rows.table[peer_R.long()], (slot * rows.own.shape[1] + result_row_R) * rows.row_bytes
    if rows.staging is None:
        return Addresses(peer_R, base_R + target_R)
    staging_R = rows.staging.data_ptr() + (first + torch.arange(peer_R.numel(), device=peer_R.device)) * rows.row_bytes
    is_remote_R = base_R == 0
    store_R = torch.where(is_remote_R, staging_R, base_R + target_R)
    return Addresses(peer_R, store_R, torch.where(is_remote_R, rows.own.data_ptr() + target_R, 0), rows.network)


def match_rows(old: Sequence[Arrivals], new: Sequence[Arrivals], peers: int, results_per_source: int) -> list[Tensor]:
    """Return, for each new chunk, the index of its rows among the concatenated rows of the old chunks.

    A row is identified by its source rank and result row. Padding gets an arbitrary index.
    """
    # Table over all result rows; padding shares the last entry.
    device = old[0].result_row_R.device
    index_P = torch.zeros(peers * results_per_source + 1, dtype=torch.int64, device=device)
    first = 0
    for arrivals in old:
        row_R = torch.arange(arrivals.layout.rows, device=device)
        index_P[_keys(arrivals, results_per_source, peers * results_per_source)] = first + row_R
        first += arrivals.layout.rows
    index_P[-1] = 0
    return [index_P[_keys(arrivals, results_per_source, peers * results_per_source)] for arrivals in new]


def _keys(arrivals: Arrivals, results_per_source: int, padding: int) -> Tensor:
    kept_R = torch.arange(arrivals.layout.rows, device=arrivals.result_row_R.device) < arrivals.layout.offsets_E1[-1]
    return torch.where(kept_R, arrivals.peer_R.long() * results_per_source + arrivals.result_row_R, padding)


def without_sources(arrivals: Arrivals) -> Layout:
    """Return the layout of rows that were copied from the buffer into the order of the layout."""
    return replace(arrivals.layout, source_N=None)


def expand_to_shards(layout: Layout, shards: int, groups: int = 1) -> Layout:
    """Expand a layout to send each row to all shards of its expert; the shards' results are summed in order.

    Rank g·shards + q hosts shard q of the e experts of group g. Pair k of a token becomes pairs k·shards + q.

    Example, 2 groups of one expert, 2 shards: rows a b | c become a b | a b | c | c.
    """
    assert layout.source_N is not None
    rows, device = layout.rows, layout.counts_E.device
    counts_Ge = layout.counts_E.view(groups, -1)
    counts_G = counts_Ge.sum(1)
    start_G = counts_G.cumsum(0) - counts_G
    kept = layout.offsets_E1[-1:].to(counts_G.dtype)
    start_G, counts_G = torch.cat([start_G, kept]), torch.cat([counts_G, rows - kept])
    start_N, count_N = (torch.repeat_interleave(of, counts_G, output_size=rows) for of in (start_G, counts_G))
    shard_Q1 = torch.arange(shards, device=device)[:, None]
    # Rows of a group's shards are consecutive, ahead of the next group's.
    place_QN = (shards - 1) * start_N + shard_Q1 * count_N + torch.arange(rows, device=device)
    counts_E = counts_Ge[:, None].expand(-1, shards, -1).reshape(-1)
    source_N, pair_N = (torch.empty_like(of).repeat(shards) for of in (layout.source_N, layout.pair_N))
    source_N[place_QN] = layout.source_N.expand(shards, -1)
    pair_N[place_QN] = layout.pair_N * shards + shard_Q1
    row_SK = layout.row_SK
    row_SKQ = row_SK[..., None].expand(*row_SK.shape, shards)
    if rows:
        placed_SKQ = place_QN.t()[row_SK.clamp(min=0)].to(row_SK.dtype)
        row_SKQ = torch.where(row_SKQ < 0, row_SKQ, placed_SKQ)
    return Layout(counts_E, offsets(counts_E), source_N, pair_N, row_SKQ.flatten(1))
