"""One-sided dispatch: each token goes once to every rank that has experts of its, by kernels that write to that rank.

Nothing here communicates or needs Triton: here is what kernels are told (receive buffers, addresses, bounds of waits),
and which rows go where.

The sender decides where in its part of the receiver's buffer a token lies, and tells in the routing metadata that goes
with the tokens: for each local expert how many rows there are and where their results go, then for each row the token's
place and its router weight. The receiver sorts rows by expert, source and the sender's order, as the collectives' path
does, and reads a token as often as experts want it.

Worked example, two ranks of one expert each, degree 1: rank 0 has tokens a, b, c with experts {0, 1}, {1}, {1}. To rank
0 it puts a, to rank 1 a, b, c in places 0, 1, 2. Rank 1 reads in the metadata: 3 rows of its expert, whose results go
to rows 1, 2, 3 of rank 0's results (row 0 there is expert 0's); then places 0, 1, 2 and the weights.

With more chunks tokens go in the order of the first chunk that needs them. The backward pass may have other chunks:
both cut an expert's rows at multiples of 1 / lcm(r, r'), so that tokens in the order of that many chunks are in order
for either. Plain torch, no host synchronisation where the number of rows is given as a bound. Definitions:
tests/kernels/test_one_sided.py.

A peer is far where this GPU cannot address its memory: it is on another node. Rows for it are first stored in memory of
this rank that NVSHMEM may read (staging), and go on from there; `triton/one_sided/network.py` says how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, offsets
from fusedmoe.kernels.tiles import Tiles

# The record of a wait that ended early has so many numbers: reason, index of the signal, expected, seen, and the
# address of the signals.
RECORD = 5
# Reasons that kernels find themselves; others are what the host has written to `stop`. The record of a fault has the
# rank where a signal's index would be, and its word (`Faults`) where the expected signal would.
TIME_IS_UP, FAULT = 1, 4
# The most that a rank's word of a fault counts.
MOST_FAULTS = 2**31 - 1


class Bounds(NamedTuple):
    """Bounds of the waits of kernels (`fusedmoe.kernels.triton.one_sided.remote.wait`)."""

    stop: Tensor
    record: Tensor
    limit_ns: int


class Faults(NamedTuple):
    """Faults that ranks find in a pass while nobody on the host looks: all ranks hear of them where the pass ends.

    A word is 0 or the number of a text (`Watch.number`) times 2³², and a count.

    Attributes:
        own: [1] int64, this rank's word.
        told: [W] int64, the words of all ranks, as far as they have told.   table: [W] all ranks' copies.
        bounds: of all waits, which end then.
    """

    own: Tensor
    told: Tensor
    table: Tensor
    bounds: Bounds


class RowLimit(NamedTuple):
    """A bound on the rows that come to a rank's experts: `own` is set where there are more than `most` (`Faults`)."""

    most: int
    own: Tensor
    number: int


class Network(NamedTuple):
    """The means by which rows get to far peers: NVSHMEM.

    Attributes:
        pe_W: int32, each rank's PE.
        spare: [1] int64 of the symmetric memory, which anybody may set and nobody reads.
        libraries: what kernels with NVSHMEM's functions are linked with.
    """

    pe_W: Tensor
    spare: Tensor
    libraries: Mapping[str, str]

    @property
    def options(self) -> dict[str, Any]:
        """Options of a launch whose kernel calls NVSHMEM."""
        return {"extern_libs": dict(self.libraries)}


def linked(network: Network | None) -> dict[str, Any]:
    """The constexpr `NVSHMEM` of a kernel, and with a network the options of its launch."""
    return {"NVSHMEM": False} if network is None else {"NVSHMEM": True, **network.options}


def far_pointers(network: Network | None) -> tuple[Tensor | None, Tensor | None]:
    """The PEs and the spare signal that a kernel takes; None twice where nobody is far."""
    return (None, None) if network is None else (network.pe_W, network.spare)


class ReceiveBuffer(NamedTuple):
    """A receive buffer as kernels see it.

    Attributes:
        rows: [slots, W, C, M], this rank's copy: what the W ranks put here; or [slots, 1, C, M], the same rows for all.
        row_table: [W] all ranks' copies, 0 for those that are far.
        signals: [slots, W, T] int64 of each rank, T = C / tile where tiles have signals.   signal_table: of these.
        tile: rows for which there is one signal.
        credits: [slots, W] int64, of each peer the last exchange of this rank's in a slot that it has read.
        credit_table: of these.
        epochs: of each slot [W] int64, the number of the exchange that is under way there or comes next, W times: what
            counts it is the kernel that gives credit, a program for each peer.
        me: this rank's place.
        network: leads to far peers; None where none is.
        staging: [slots, W, C, M], rows for far peers on their way; None where none is, or where they have theirs.
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
    def peers(self) -> int:
        return self.credits.shape[1]


class Addresses(NamedTuple):
    """Addresses to which rows go, and through which network.

    Attributes:
        peer_N: int32, to whom.
        store_N: int64, what a kernel stores to: at the peer, or, where that is far, in staging, where rows that follow
            one another lie together.
        target_N: int64, of this rank's symmetric memory: where the row goes in the peer's. 0 where that is near; None
            where nobody is far.
        network: leads to far peers; None where none is.
    """

    peer_N: Tensor
    store_N: Tensor
    target_N: Tensor | None = None
    network: Network | None = None


class Mark(NamedTuple):
    """The signal of this rank at every peer: number `place` of their `signals`, whose addresses `table` [W] has."""

    signals: Tensor
    place: int
    table: Tensor


class Put(NamedTuple):
    """Rows that go to other ranks' memory.

    Attributes:
        like: of the rows' dtype.
        addresses: of the rows.   weight_N: factors, or None for 1.
        wanted_W: int32, rows of each peer.   counter_W: int32 zeros, where a launch counts those that are done.
        signal_W: int64, the addresses of what to set to `epoch` when they are all there; for far peers a spare one.
        epoch: [1] int64 or more, whose first is the number of the exchange.
        mark: the same signal once more, for far peers.
    """

    like: Tensor
    addresses: Addresses
    weight_N: Tensor | None
    wanted_W: Tensor
    counter_W: Tensor
    signal_W: Tensor
    epoch: Tensor
    mark: Mark


class Wait(NamedTuple):
    """Rows lie in a receive buffer and may still be on their way: those that `layout.source_N` names are waited for.

    Attributes:
        signals: [..., T] int64, of the rows of the buffer in order, one for each `tile` of them.
        epoch: [1] int64 or more, whose first is the number of the exchange that they come with.
        network: leads to far peers; None where none is.
    """

    signals: Tensor
    tile: int
    epoch: Tensor
    bounds: Bounds
    network: Network | None = None


class Sends(NamedTuple):
    """Tokens and routing metadata that a rank puts into its peers' receive buffers.

    Attributes:
        token_WC: int32, the token at each place of a peer's buffer; token_used_W: int32, how many there are.
        metadata: [E + N, 2] int32, lines for all peers; line_WC, line_used_W: those of each peer.
    Kernels leave tables flat, as other kernels read them.
    """

    token_WC: Tensor
    token_used_W: Tensor
    metadata: Tensor
    line_WC: Tensor
    line_used_W: Tensor


class Arrivals(NamedTuple):
    """One chunk of what has been put here, sorted by local expert, then source, then the sender's order.

    Attributes:
        layout: `source_N` are rows of a slot of the buffer; padding may follow.
        weight_R: float32 router weights.   peer_R: int32, sources.   place_R: int64, the result's row there.
        wanted_W: int32, rows of each source.
    """

    layout: Layout
    weight_R: Tensor
    peer_R: Tensor
    place_R: Tensor
    wanted_W: Tensor


class ReturnRows(NamedTuple):
    """Rows of all ranks' memory to which something is returned for each row that came.

    Attributes:
        own: [slots, places, width], this rank's copy.   table: [W] all ranks' copies, 0 for those that are far.
        staged: [rows, width], rows for far peers on their way, of all chunks in order; None where nobody is far.
        network: leads to far peers; None where none is.
    """

    own: Tensor
    table: Tensor
    staged: Tensor | None = None
    network: Network | None = None

    @property
    def row_bytes(self) -> int:
        return self.own.shape[2] * self.own.itemsize


class ArrivedChunk(NamedTuple):
    """One chunk of what has been put here, and where its results go.

    Attributes:
        results, values: addresses of the rows' results, and of the number that goes with each, by slot of the results.
        counters: int32 zeros [W] for each pass, where its launch counts the rows that are done (`Put`).
        tiles: row tiles, by their height.
    """

    arrivals: Arrivals
    results: Sequence[Addresses]
    values: Sequence[Addresses]
    counters: Sequence[Tensor]
    tiles: Mapping[int, Tiles]


def chunk_of(place: Tensor, count: Tensor, degree: int) -> Tensor:
    """The chunk of an expert's i-th row of `count`, where chunk j has those from ⌊count·j/degree⌋ on."""
    return ((place + 1) * degree - 1).div(count.clamp(min=1), rounding_mode="floor").clamp(max=degree - 1)


def define_sends(layout: Layout, weight_SK: Tensor | None, peers: int, degree: int, capacity: int, lines: int) -> Sends:
    """Plans what this rank puts: which tokens to which peer in which order, and the routing metadata.

    Args:
        layout: of its tokens over all E experts; rank p has those from p·E/peers on.
        weight_SK: router weight of each pair; None for 1.
        degree: chunks in which receivers compute; decides the order of tokens.
        capacity, lines: places that each rank has in a peer's buffers of tokens and of lines.
    """
    assert layout.source_N is not None
    device, tokens, rows = layout.counts_E.device, layout.tokens, layout.rows
    local = layout.experts // peers
    row_N = torch.arange(rows, device=device)
    kept_N = row_N < layout.offsets_E1[-1]
    expert_N = torch.searchsorted(layout.offsets_E1[1:].contiguous(), row_N, right=True).clamp(max=layout.experts - 1)
    peer_N = expert_N // local
    chunk_N = chunk_of(row_N - layout.offsets_E1[expert_N], layout.counts_E[expert_N], degree)

    # Of each token and peer the first chunk that needs it; `degree` where none does.
    pair_N = torch.where(kept_N, layout.source_N * peers + peer_N, tokens * peers)
    first = torch.full((tokens * peers + 1,), degree, device=device).scatter_reduce(0, pair_N, chunk_N, "amin")
    first_SW = first[:-1].view(tokens, peers)
    # Tokens of the first chunk come first, so that its tiles are complete first.
    token_SW = first_SW.argsort(dim=0, stable=True)
    place_SW = torch.empty_like(token_SW).scatter_(0, token_SW, _rows_like(token_SW))
    token_WC = torch.zeros((peers, capacity), dtype=torch.int32, device=device)
    token_WC[:, :tokens] = token_SW.t()

    start_E = layout.offsets_E1[:-1]
    # The metadata begins with a line for each expert: how many rows, and which is the first. A line for each row
    # follows: the place of its token, and the bits of its weight.
    head = torch.stack([layout.counts_E.to(torch.int32), start_E], 1)
    place_N = place_SW.view(-1)[pair_N.clamp(max=max(tokens * peers - 1, 0))] if tokens else row_N
    weight = torch.ones(rows, device=device) if weight_SK is None else weight_SK.reshape(-1)[layout.pair_N].float()
    body = torch.stack([place_N.to(torch.int32), weight.contiguous().view(torch.int32)], 1)
    count_W = layout.counts_E.view(peers, local).sum(1)
    line = torch.arange(lines, device=device)
    own_W1 = torch.arange(peers, device=device)[:, None]
    # A peer gets the lines of its own experts, then those of their rows, which lie in one piece.
    line_WC = torch.where(
        line < local, own_W1 * local + line, layout.experts + start_E[::local][:, None] + line - local
    ).clamp(max=max(layout.experts + rows - 1, 0))
    return Sends(
        token_WC,
        (first_SW < degree).sum(0, dtype=torch.int32),
        torch.cat([head, body]),
        line_WC.to(torch.int32),
        (count_W + local).to(torch.int32),
    )


def define_arrivals(
    metadata_WC2: Tensor, experts: int, degree: int, capacity: int, rows: Sequence[int]
) -> list[Arrivals]:
    """Reads the routing metadata: the layout of what has been put here, chunk by chunk.

    Rows beyond a chunk's bound are left out, and nobody waits for their results.

    Args:
        metadata_WC2: int32, all ranks' routing metadata.
        experts: of this rank.
        capacity: places of each source in a slot of the buffer.
        rows: of each chunk, or bounds on them.
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
        # A group is the rows of one expert from one source. Rows beyond the last group are padding, and count to it.
        group_R = torch.searchsorted(end_G, row_R, right=True).clamp(max=end_G.numel() - 1)
        inside_R = row_R - (end_G - count_eW.reshape(-1))[group_R]
        expert_R, peer_R = group_R // peers, group_R % peers
        inside_R = inside_R + skipped_We[peer_R, expert_R]
        line_R = peer_R * metadata_WC2.shape[1] + experts + before_We[peer_R, expert_R] + inside_R
        kept_R = row_R < end_G[-1]
        # Padding reads line 0, which exists, and gets source 0.
        line = flat[torch.where(kept_R, line_R, 0)]
        source_R = peer_R * capacity + torch.where(kept_R, line[:, 0].long(), 0)
        count_e = count_eW.sum(1)
        layout = Layout(count_e, offsets(count_e), source_R, row_R, row_R.view(-1, 1))
        weight_R = line[:, 1].contiguous().view(torch.float32)
        place_R = start_We[peer_R, expert_R] + inside_R
        chunks.append(Arrivals(layout, weight_R, peer_R.to(torch.int32), place_R, count_eW.sum(0, dtype=torch.int32)))
    return chunks


def define_addresses(peer_R: Tensor, place_R: Tensor, rows: ReturnRows, slot: int, first: int) -> Addresses:
    """Finds the addresses of rows in the peers' copies; for far peers, in staging from row `first` on."""
    base_R, target_R = rows.table[peer_R.long()], (slot * rows.own.shape[1] + place_R) * rows.row_bytes
    if rows.staged is None:
        return Addresses(peer_R, base_R + target_R)
    staged_R = rows.staged.data_ptr() + (first + torch.arange(peer_R.numel(), device=peer_R.device)) * rows.row_bytes
    # No address of theirs leads there.
    far_R = base_R == 0
    store_R = torch.where(far_R, staged_R, base_R + target_R)
    return Addresses(peer_R, store_R, torch.where(far_R, rows.own.data_ptr() + target_R, 0), rows.network)


def find_rows(old: Sequence[Arrivals], new: Sequence[Arrivals], peers: int, places: int) -> list[Tensor]:
    """Finds, for each new chunk, its rows among those of the old chunks, which lie in order with their padding.

    Both are the same rows in other chunks; padding gets any row's number. A row is known by its source, and by where
    its result goes.

    Args:
        peers: sources.
        places: buffer slots that each source has for results.
    """
    # A table of all places that results can have; padding shares the last entry.
    device = old[0].place_R.device
    number_P = torch.zeros(peers * places + 1, dtype=torch.int64, device=device)
    first = 0
    for arrivals in old:
        row_R = torch.arange(arrivals.layout.rows, device=device)
        number_P[_keys(arrivals, places, peers * places)] = first + row_R
        first += arrivals.layout.rows
    number_P[-1] = 0
    return [number_P[_keys(arrivals, places, peers * places)] for arrivals in new]


def _keys(arrivals: Arrivals, places: int, padding: int) -> Tensor:
    """[R]: a number for each row of a rank; `padding` for padding."""
    kept_R = torch.arange(arrivals.layout.rows, device=arrivals.place_R.device) < arrivals.layout.offsets_E1[-1]
    return torch.where(kept_R, arrivals.peer_R.long() * places + arrivals.place_R, padding)


def contiguous(arrivals: Arrivals) -> Layout:
    """The layout once the rows have been copied out of the buffer in its order."""
    return replace(arrivals.layout, source_N=None)


def _rows_like(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None].expand_as(x)


def for_all_shards(layout: Layout, shards: int, groups: int = 1) -> Layout:
    """The layout by which every row goes to all shards of its expert, and the shards' results are added up in order.

    Rank number g·shards + q has shard q of the e experts of group g, of G groups.

    Args:
        layout: over the G·e experts.
        groups: G.
    Returns:
        over G·shards·e experts, those of a rank together, in the order of ranks; pair k of a token becomes pairs
        k·shards + q.
    Worked example, G = 2 groups of one expert, 2 shards: rows a b | c, of experts 0 and 1, become a b | a b | c | c.
    """
    assert layout.source_N is not None
    rows, device = layout.rows, layout.counts_E.device
    counts_Ge = layout.counts_E.view(groups, -1)
    counts_G = counts_Ge.sum(1)
    start_G = counts_G.cumsum(0) - counts_G
    # Padding is a group of its own, the last one.
    kept = layout.offsets_E1[-1:].to(counts_G.dtype)
    start_G, counts_G = torch.cat([start_G, kept]), torch.cat([counts_G, rows - kept])
    start_N, count_N = (torch.repeat_interleave(of, counts_G, output_size=rows) for of in (start_G, counts_G))
    shard_Q1 = torch.arange(shards, device=device)[:, None]
    # The rows of a group's shards follow each other, ahead of the next group's.
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
