"""Plans of one-sided dispatch as kernels: what this rank puts, what has come, and where its results go.

Definitions: `define_sends`, `define_arrivals` and `define_addresses` in `fusedmoe/kernels/one_sided.py`, of some
hundred operations in torch. Here the first takes two launches at most, and the other two together one for all chunks:
it writes down where results go in each slot of the results, so that both passes find their addresses made, and cuts the
rows into tiles of each height that products of rows may have.

Sends: (1) Each block of tokens finds, for each peer, the first chunk that needs each token, and counts them by chunk.
(2) Each block sums up the counts of the blocks before; a token's place is behind those of earlier chunks and, in its
own, of tokens before it. Rows are compared with the first rows of a peer's experts: no table of experts is needed.
Of few tokens every block counts all on its own: one launch, where a batch is so small that launches are what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Addresses, Arrivals, ArrivedChunk, ReturnRows, RowLimit, Sends
from fusedmoe.kernels.tiles import Tiles, tile_bound
from fusedmoe.kernels.triton.gather_sum import columns
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit
from fusedmoe.kernels.triton.layout import ALONE
from fusedmoe.kernels.triton.tiles import block_sizes, find_tiles

#: Tokens of a block; a program compares each with all of a peer's experts.
TOKENS = 128
# Comparisons of a program that reads: of each row with all groups.
_COMPARISONS = 16384
_UNSPECIAL = ["S", "N", "degree", "tiles", "bound", "most", "number"]


@triton.jit
def _experts_of(offsets_ptr, peer, local, LP: tl.constexpr):
    """First row and count of each of a peer's experts; no row is in those that do not exist."""
    e = tl.arange(0, LP)
    start = tl.load(offsets_ptr + peer * local + e, mask=e < local, other=0)
    end = tl.load(offsets_ptr + peer * local + e + 1, mask=e < local, other=0)
    return start, end - start


@triton.jit
def _chunk_of(row, start, count, degree):
    """The chunk of each row at its expert; `degree` where that is none of these experts."""
    mine = (row[:, None] >= start[None, :]) & (row[:, None] < (start + count)[None, :])
    place = row - tl.sum(tl.where(mine, start[None, :], 0), 1)
    of = tl.sum(tl.where(mine, count[None, :], 0), 1)
    chunk = ((place + 1).to(tl.int64) * degree - 1) // tl.maximum(of, 1)
    return tl.where(of > 0, tl.minimum(chunk, degree - 1), degree).to(tl.int32)


@triton.jit
def _first_chunks(row_ptr, s, start, count, S, K, degree, BLOCK: tl.constexpr):
    """Finds the first chunk that needs each token; `degree` where none does."""
    first = tl.full((BLOCK,), 0, tl.int32) + degree
    for k in range(K):
        row = tl.load(row_ptr + s.to(tl.int64) * K + k, mask=s < S, other=-1).to(tl.int32)
        first = tl.minimum(first, _chunk_of(row, start, count, degree))
    return first


@triton.jit
def _of_each_chunk(first, degree, DP: tl.constexpr):
    """Counts the tokens that each chunk is the first to need."""
    d = tl.arange(0, DP)
    return tl.sum(((first[:, None] == d[None, :]) & (d < degree)[None, :]).to(tl.int32), 0)


@jit(do_not_specialize=_UNSPECIAL)
def count_chunks_kernel(
    row_ptr, offsets_ptr, first_ptr, counts_ptr, S, K, W, local, degree, tiles,
    BLOCK: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """first [W, S]: of each token the first chunk that needs it, `degree` where none does; counts [W, tiles, DP]."""
    tile, peer = tl.program_id(0) // W, tl.program_id(0) % W
    start, count = _experts_of(offsets_ptr, peer, local, LP)
    s = tile * BLOCK + tl.arange(0, BLOCK)
    first = _first_chunks(row_ptr, s, start, count, S, K, degree, BLOCK)
    tl.store(first_ptr + peer.to(tl.int64) * S + s, first, mask=s < S)
    tl.store(counts_ptr + (peer * tiles + tile) * DP + tl.arange(0, DP), _of_each_chunk(first, degree, DP))


@jit(do_not_specialize=_UNSPECIAL)
def place_tokens_kernel(
    # `first_ptr`, `counts_ptr`: what the launch before has made, or None.
    row_ptr, offsets_ptr, weight_ptr, first_ptr, counts_ptr,
    token_ptr, token_used_ptr, metadata_ptr, line_ptr, line_used_ptr,
    S, K, W, C, L, local, degree, tiles,
    BLOCK: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, TP: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    tile, peer = tl.program_id(0) // W, tl.program_id(0) % W
    start, count = _experts_of(offsets_ptr, peer, local, LP)
    d, t, E = tl.arange(0, DP), tl.arange(0, TP), W * local
    s = tile * BLOCK + tl.arange(0, BLOCK)
    if counts_ptr is None:
        first = _first_chunks(row_ptr, s, start, count, S, K, degree, BLOCK)
        total = tl.zeros((DP,), dtype=tl.int32)
        earlier = tl.zeros((DP,), dtype=tl.int32)
        for other in range(0, tiles):
            others = _first_chunks(row_ptr, other * BLOCK + tl.arange(0, BLOCK), start, count, S, K, degree, BLOCK)
            counts = _of_each_chunk(others, degree, DP)
            total += counts
            earlier += tl.where(other < tile, counts, 0)
    else:
        first = tl.load(first_ptr + peer.to(tl.int64) * S + s, mask=s < S, other=degree)
        counts = tl.load(counts_ptr + (peer * tiles + t)[:, None] * DP + d[None, :], mask=(t < tiles)[:, None], other=0)
        total = tl.sum(counts, 0)
        earlier = tl.sum(tl.where((t < tile)[:, None], counts, 0), 0)
    before = tl.cumsum(total, 0) - total + earlier

    mine = ((first[:, None] == d[None, :]) & (first < degree)[:, None]).to(tl.int32)
    place = tl.sum(mine * (before[None, :] + tl.cumsum(mine, 0) - 1), 1)
    tl.store(token_ptr + peer.to(tl.int64) * C + place, s, mask=first < degree)
    # A line for each row: the place of its token, and the bits of its weight.
    first_row, rows = tl.load(offsets_ptr + peer * local), tl.sum(count, 0)
    for k in range(K):
        row = tl.load(row_ptr + s.to(tl.int64) * K + k, mask=s < S, other=-1).to(tl.int32)
        here = (row >= first_row) & (row < first_row + rows)
        line = (E + row).to(tl.int64)
        tl.store(metadata_ptr + 2 * line, place, mask=here)
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + s.to(tl.int64) * K + k, mask=here, other=0.0).to(tl.float32)
        tl.store(metadata_ptr + 2 * line + 1, weight.to(tl.int32, bitcast=True), mask=here)
        # The peer gets it behind the lines of its experts.
        tl.store(line_ptr + peer.to(tl.int64) * L + local + row - first_row, E + row, mask=here)
    if tile == 0:
        e = tl.arange(0, LP)
        head = peer * local + e
        tl.store(metadata_ptr + 2 * head, count, mask=e < local)
        tl.store(metadata_ptr + 2 * head + 1, start, mask=e < local)
        tl.store(line_ptr + peer.to(tl.int64) * L + e, head, mask=e < local)
        tl.store(token_used_ptr + peer, tl.sum(total, 0))
        tl.store(line_used_ptr + peer, rows + local)


def plan_sends(layout: Layout, weight_SK: Tensor | None, peers: int, degree: int, capacity: int, lines: int) -> Sends:
    """Plans what this rank puts, as `define_sends`; what nobody is sent stays unwritten."""
    offsets_E1, (tokens, k), local = layout.offsets_E1, layout.row_SK.shape, layout.experts // peers
    tiles = max(1, triton.cdiv(tokens, TOKENS))
    padded = triton.next_power_of_2(degree)
    made = (peers * capacity, peers, 2 * (layout.experts + layout.rows), peers * lines, peers)
    alone = tokens * k <= ALONE
    counted = () if alone else (peers * tokens, peers * tiles * padded)
    *counts, token_WC, token_used_W, metadata, line_WC, line_used_W = _parts(offsets_E1, torch.int32, *counted, *made)
    sends = Sends(token_WC, token_used_W, metadata, line_WC, line_used_W)
    blocks = {"BLOCK": TOKENS, "LP": triton.next_power_of_2(local), "DP": padded}
    grid, row_SK = (tiles * peers,), layout.row_SK.contiguous()
    if not alone:
        count_chunks_kernel[grid](
            row_SK, offsets_E1, *counts, tokens, k, peers, local, degree, tiles, **blocks, num_warps=4
        )
    place_tokens_kernel[grid](
        row_SK, offsets_E1, None if weight_SK is None else weight_SK.contiguous(), *(counts or (None, None)), *sends,
        tokens, k, peers, capacity, lines, local, degree, tiles,
        **blocks, TP=1 if alone else triton.next_power_of_2(tiles), WEIGHTED=weight_SK is not None, num_warps=4,
        maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return sends


def _parts(like: Tensor, dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    """Allocates vectors in one piece; each begins where 16 bytes align it, as kernels are compiled for."""
    cut = [part for size in sizes for part in (size, -size % 4)]
    return list(like.new_empty(sum(cut), dtype=dtype).split(cut)[::2])


@triton.jit
def _store_addresses(
    address_ptr, target_ptr, table_ptr, own_ptr, staged_ptr, peer, place, number, kept, stored,
    step, places, row_bytes, SLOTS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The addresses of rows in each slot of the peers' copies (`define_addresses`); those of slots are `step` apart."""
    base = tl.load(table_ptr + peer, mask=kept, other=0)
    for slot in tl.static_range(SLOTS):
        target = (slot * places + place) * row_bytes
        address = base + target
        if FAR:
            far = base == 0
            address = tl.where(far, staged_ptr.to(tl.int64) + number * row_bytes, address)
            target = tl.where(far, own_ptr.to(tl.int64) + target, 0)
            tl.store(target_ptr + slot * step + number, target, mask=stored)
        tl.store(address_ptr + slot * step + number, address, mask=stored)


@jit(do_not_specialize=_UNSPECIAL)
def read_metadata_kernel(
    metadata_ptr,
    # Of each chunk, one behind the other: rows of experts, and how many rows go to each peer.
    count_ptr, offsets_ptr, wanted_ptr, counter_ptr, later_counter_ptr,
    # Of each row, chunk behind chunk.
    source_ptr, place_ptr, weight_ptr, peer_ptr, pair_ptr,
    # Where results go, and values: all copies, this rank's, staging; and the addresses there, slot behind slot.
    result_table_ptr, result_own_ptr, result_staged_ptr, result_ptr, result_target_ptr,
    value_table_ptr, value_own_ptr, value_staged_ptr, value_ptr, value_target_ptr,
    # Row tiles of LOWEST rows, chunk behind chunk, then of twice as many, …: how many, and which (`find_tiles`).
    tiles_ptr,
    # Where it is told that more rows come than `most`, and the number of that fault; None where nobody asks.
    fault_ptr, most, number,
    L, C, local, W, degree, bound, tiles, places, result_bytes, value_bytes,
    BLOCK: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr, SLOTS: tl.constexpr, FAR: tl.constexpr,
    LOWEST: tl.constexpr, HEIGHTS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    # A group is the rows of one expert from one source; they lie expert by expert.
    e, w = tl.arange(0, LP), tl.arange(0, WP)
    known = (e < local)[:, None] & (w < W)[None, :]
    head = metadata_ptr + (w[None, :].to(tl.int64) * L + e[:, None]) * 2
    all_eW = tl.load(head, mask=known, other=0)
    first_eW = tl.load(head + 1, mask=known, other=0)
    skipped_eW = (all_eW.to(tl.int64) * chunk // degree).to(tl.int32)
    count_eW = (all_eW.to(tl.int64) * (chunk + 1) // degree).to(tl.int32) - skipped_eW
    before_eW = tl.cumsum(all_eW, 0) - all_eW
    count_G = tl.reshape(count_eW, (LP * WP,))
    end_G = tl.cumsum(count_G, 0)
    kept = tl.sum(count_G, 0)
    # What is to be added to a row's number for its place among its source's rows of the expert; for its line, and for
    # the row of its result there.
    inside_G = tl.reshape(skipped_eW, (LP * WP,)) - (end_G - count_G)
    line_G = tl.reshape(w[None, :] * L + local + before_eW, (LP * WP,))
    result_G = tl.reshape(first_eW, (LP * WP,))
    source_G = tl.reshape(w[None, :] + e[:, None] * 0, (LP * WP,))

    row = block * BLOCK + tl.arange(0, BLOCK)
    mine = (row[:, None] >= (end_G - count_G)[None, :]) & (row[:, None] < end_G[None, :])
    peer = tl.sum(tl.where(mine, source_G[None, :], 0), 1)
    inside = row + tl.sum(tl.where(mine, inside_G[None, :], 0), 1)
    line = inside + tl.sum(tl.where(mine, line_G[None, :], 0), 1)
    place = inside + tl.sum(tl.where(mine, result_G[None, :], 0), 1)
    # Padding reads the first place of source 0, which exists, and goes to nobody.
    known_row, stored = row < kept, row < bound
    place = tl.where(known_row, place, 0).to(tl.int64)
    line_ptr = metadata_ptr + 2 * line.to(tl.int64)
    token = tl.load(line_ptr, mask=known_row, other=0)
    at = chunk.to(tl.int64) * bound + row
    tl.store(source_ptr + at, peer.to(tl.int64) * C + token, mask=stored)
    weight = tl.load(line_ptr + 1, mask=known_row, other=0).to(tl.float32, bitcast=True)
    tl.store(weight_ptr + at, weight, mask=stored)
    tl.store(peer_ptr + at, tl.where(known_row, peer, -1), mask=stored)
    tl.store(place_ptr + at, place, mask=stored)
    step = (tl.num_programs(0) // tiles).to(tl.int64) * bound
    _store_addresses(
        result_ptr, result_target_ptr, result_table_ptr, result_own_ptr, result_staged_ptr,
        peer, place, at, known_row, stored, step, places, result_bytes, SLOTS, FAR,
    )  # fmt: skip
    _store_addresses(
        value_ptr, value_target_ptr, value_table_ptr, value_own_ptr, value_staged_ptr,
        peer, place, at, known_row, stored, step, places, value_bytes, SLOTS, FAR,
    )  # fmt: skip
    if chunk == 0:
        tl.store(pair_ptr + row, row.to(tl.int64), mask=stored)
    # Without the rows for which there is no room: nobody computes them, or waits for them.
    inside_G = tl.minimum(end_G, bound) - tl.minimum(end_G - count_G, bound)
    inside_eW = tl.reshape(inside_G, (LP, WP))
    count_e = tl.sum(inside_eW, 1)
    end_e = tl.cumsum(count_e, 0)
    for height in tl.static_range(HEIGHTS):
        n_tiles = bound // (LOWEST << height) + local
        # Each vector begins where 16 bytes align it: the number, then the table.
        length = 4 + (2 * n_tiles + 3) // 4 * 4
        used_ptr = tiles_ptr + chunk * length
        for first_tile in range(block * BT, n_tiles, tiles * BT):
            tile = first_tile + tl.arange(0, BT)
            expert, start, used = find_tiles(end_e - count_e, count_e, tile, local, LOWEST << height, LP)
            tl.store(used_ptr + 4 + 2 * tile, expert, mask=tile < n_tiles)
            tl.store(used_ptr + 4 + 2 * tile + 1, start, mask=tile < n_tiles)
            if first_tile == 0:
                tl.store(used_ptr, used)
        tiles_ptr += degree * length
    if block == 0:
        of_peers, of_experts, of_ends = (W + 3) // 4 * 4, (local + 3) // 4 * 4, (local + 4) // 4 * 4
        tl.store(count_ptr + chunk * of_experts + e, count_e.to(tl.int64), mask=e < local)
        tl.store(offsets_ptr + chunk * of_ends + e + 1, end_e, mask=e < local)
        tl.store(offsets_ptr + chunk * of_ends, 0)
        tl.store(wanted_ptr + chunk * of_peers + w, tl.sum(inside_eW, 0), mask=w < W)
        tl.store(counter_ptr + chunk * of_peers + w, w * 0, mask=w < W)
        tl.store(later_counter_ptr + chunk * of_peers + w, w * 0, mask=w < W)
        if fault_ptr is not None:
            rows = tl.sum(tl.reshape(all_eW, (LP * WP,)).to(tl.int64), 0)
            if rows > most:
                tl.store(fault_ptr, (number.to(tl.int64) << 32) + rows)


def read_metadata(
    metadata_WC2: Tensor,
    experts: int,
    degree: int,
    capacity: int,
    rows: int,
    results: ReturnRows,
    values: ReturnRows,
    heights: Sequence[int],
    limit: RowLimit | None = None,
) -> list[ArrivedChunk]:
    """Reads what comes, as `define_arrivals`, `define_addresses` and `define_tiles`; padding is of source 0 and goes to
    peer -1.

    Args:
        rows: a bound on those of each chunk. It is rounded up to a multiple of four.
        results, values: where the rows' results go, and a number with each.
        heights: rows of row tiles, each twice as many as the one before.
        limit: on the rows of all chunks, to be told of.
    """
    peers, lines, _ = metadata_WC2.shape
    slots, places, _ = results.own.shape
    far, bound = results.staged is not None, -(-rows // 4) * 4
    blocks = {"LP": triton.next_power_of_2(experts), "WP": triton.next_power_of_2(peers)}
    block = rows_of_program(blocks["LP"] * blocks["WP"])
    tiles = max(1, triton.cdiv(bound, block))

    # Vectors chunk behind chunk, those of slots slot behind slot.
    addresses = 2 * slots * (2 if far else 1)
    vectors = degree * (2 + addresses)
    *long, pair_R = _parts(metadata_WC2, torch.int64, *[experts] * degree, *[bound] * (vectors + 1))
    count, source, place, *addressed = (long[first : first + degree] for first in range(0, len(long), degree))
    weight = _parts(metadata_WC2, torch.float32, *[bound] * degree)
    lowest, *others = heights
    assert others == [lowest << 1 + number for number in range(len(others))]
    table_sizes = [size for height in heights for size in (1, 2 * tile_bound(bound, experts, height)) * degree]
    sizes = *[bound] * degree, *[experts + 1] * degree, *[peers] * degree * 3, *table_sizes
    short = _parts(metadata_WC2, torch.int32, *sizes)
    peer, offsets, wanted, counter, later = (short[first : first + degree] for first in range(0, 5 * degree, degree))
    cut = [Tiles(table.view(-1, 2), used) for used, table in zip(*[iter(short[5 * degree :])] * 2, strict=True)]
    stores, targets = addressed[: 2 * slots], addressed[2 * slots :]
    ways = []
    for way, first in ((results, 0), (values, slots)):
        own, staged, target = (way.own, way.staged, targets[first][0]) if far else (None, None, None)
        ways.append((way.table, own, staged, stores[first][0], target))
    read_metadata_kernel[(tiles * degree,)](
        metadata_WC2, *(of[0] for of in (count, offsets, wanted, counter, later, source, place, weight, peer)), pair_R,
        *ways[0], *ways[1], cut[0].used, *((None, 0, 0) if limit is None else (limit.own, limit.most, limit.number)),
        lines, capacity, experts, peers, degree, bound, tiles, places, results.row_bytes, values.row_bytes,
        BLOCK=block, **blocks, SLOTS=slots, FAR=far,
        LOWEST=lowest, HEIGHTS=len(heights), BT=block_sizes(experts)[1], num_warps=4,
    )  # fmt: skip
    row_R1, chunks = pair_R.view(-1, 1), []
    for chunk in range(degree):
        layout = Layout(count[chunk], offsets[chunk], source[chunk], pair_R, row_R1)
        there = [
            Addresses(peer[chunk], store[chunk], targets[number][chunk] if far else None, results.network)
            for number, store in enumerate(stores)
        ]
        arrivals = Arrivals(layout, weight[chunk], peer[chunk], place[chunk], wanted[chunk])
        of_chunk = dict(zip(heights, cut[chunk::degree], strict=True))
        chunks.append(ArrivedChunk(arrivals, there[:slots], there[slots:], (counter[chunk], later[chunk]), of_chunk))
    return chunks


@jit
def take_rows_kernel(x_ptr, source_ptr, peer_ptr, rows_ptr, M, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Padding is written as zeros and reads nothing: its mask has no columns.
    kept = tl.where(tl.load(peer_ptr + n) < 0, 0, M)
    x = tl.load(x_ptr + tl.load(source_ptr + n) * M + column, mask=column < kept, other=0)
    tl.store(rows_ptr + n * M + column, x, mask=column < M)


def take_rows(x_CM: Tensor, chunks: Sequence[Arrivals]) -> list[Tensor]:
    """Copies the rows of all chunks of `read_metadata` out of a slot of the buffer, x_CM, in one launch.

    Definition: `define_permute` of each chunk's layout.

    Returns:
        of each chunk [R, M], sorted by expert; zeros in padding.
    """
    (peer_R, source_R), width = (chunks[0].peer_R, chunks[0].layout.source_N), x_CM.shape[1]
    x_DRM = x_CM.new_empty((len(chunks), len(peer_R), width))
    if x_DRM.numel():
        # Chunks lie one behind the other.
        block, warps = columns(width)
        grid = (len(chunks) * len(peer_R), triton.cdiv(width, block))
        take_rows_kernel[grid](x_CM, source_R, peer_R, x_DRM, width, BLOCK=block, num_warps=warps)
    return list(x_DRM.unbind())


def rows_of_program(groups: int) -> int:
    """Returns how many rows a program reads, where there are so many groups; both are powers of two."""
    return min(256, max(16, _COMPARISONS // groups))
