"""Plan kernels of one-sided dispatch: tokens that this rank puts, rows it received, and destinations of results.

References: `define_sends`, `define_arrivals` and `define_addresses`, some hundred torch operations. Sends take at most
two launches. One launch computes the arrivals of all chunks, the addresses for every result slot and both passes, and
the row tiles of each height that the grouped GEMMs may use. Another launch precedes it if rows are sorted by arrival.

Sends: (1) Each block of tokens computes, per peer, the first chunk that needs each token, and counts tokens by chunk.
(2) Each block sums the counts of the blocks before it; a token's buffer row follows the tokens of earlier chunks and,
within its chunk, earlier tokens. For few tokens every block counts all of them: one launch. Rows are compared with the
first rows of a peer's experts, without a table of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout, Tiles, tile_bound
from fusedmoe.kernels.one_sided import Addresses, Arrivals, ArrivedChunk, ReturnBuffers, RowLimit, Sends
from fusedmoe.kernels.triton.gather_sum import columns
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit
from fusedmoe.kernels.triton.layout import ALONE, block_sizes, find_tiles

# Tokens per block; a program compares each with all of a peer's experts.
TOKENS = 128
# Comparisons per program that reads metadata: each row with all groups.
_COMPARISONS = 16384
_DYNAMIC_ARGUMENTS = ["S", "N", "degree", "tiles", "bound", "most", "number"]


@triton.jit
def _experts_of(offsets_ptr, peer, local, LP: tl.constexpr):
    e = tl.arange(0, LP)
    start = tl.load(offsets_ptr + peer * local + e, mask=e < local, other=0)
    end = tl.load(offsets_ptr + peer * local + e + 1, mask=e < local, other=0)
    return start, end - start


@triton.jit
def _chunk_of(row, start, count, degree):
    """Return the chunk of each row at its expert; `degree` if it belongs to none of these experts."""
    mine = (row[:, None] >= start[None, :]) & (row[:, None] < (start + count)[None, :])
    place = row - tl.sum(tl.where(mine, start[None, :], 0), 1)
    of = tl.sum(tl.where(mine, count[None, :], 0), 1)
    chunk = ((place + 1).to(tl.int64) * degree - 1) // tl.maximum(of, 1)
    return tl.where(of > 0, tl.minimum(chunk, degree - 1), degree).to(tl.int32)


@triton.jit
def _first_chunks(row_ptr, s, start, count, S, K, degree, BLOCK: tl.constexpr):
    """Return the first chunk that needs each token; `degree` if none does."""
    first = tl.full((BLOCK,), 0, tl.int32) + degree
    for k in range(K):
        row = tl.load(row_ptr + s.to(tl.int64) * K + k, mask=s < S, other=-1).to(tl.int32)
        first = tl.minimum(first, _chunk_of(row, start, count, degree))
    return first


@triton.jit
def _count_by_chunk(first, degree, DP: tl.constexpr):
    d = tl.arange(0, DP)
    return tl.sum(((first[:, None] == d[None, :]) & (d < degree)[None, :]).to(tl.int32), 0)


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def count_chunks_kernel(
    row_ptr, offsets_ptr, first_ptr, counts_ptr, S, K, W, local, degree, tiles,
    BLOCK: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write first [W, S], the first chunk that needs each token (`degree` if none), and counts [W, tiles, DP]."""
    tile, peer = tl.program_id(0) // W, tl.program_id(0) % W
    start, count = _experts_of(offsets_ptr, peer, local, LP)
    s = tile * BLOCK + tl.arange(0, BLOCK)
    first = _first_chunks(row_ptr, s, start, count, S, K, degree, BLOCK)
    tl.store(first_ptr + peer.to(tl.int64) * S + s, first, mask=s < S)
    tl.store(counts_ptr + (peer * tiles + tile) * DP + tl.arange(0, DP), _count_by_chunk(first, degree, DP))


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def place_tokens_kernel(
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
            counts = _count_by_chunk(others, degree, DP)
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
        # The peer's buffer begins with the lines of its experts.
        tl.store(line_ptr + peer.to(tl.int64) * L + local + row - first_row, E + row, mask=here)
    if tile == 0:
        e = tl.arange(0, LP)
        head = peer * local + e
        tl.store(metadata_ptr + 2 * head, count, mask=e < local)
        tl.store(metadata_ptr + 2 * head + 1, start, mask=e < local)
        tl.store(line_ptr + peer.to(tl.int64) * L + e, head, mask=e < local)
        tl.store(token_used_ptr + peer, tl.sum(total, 0))
        tl.store(line_used_ptr + peer, rows + local)


def plan_sends(
    layout: Layout, weight_SK: Tensor | None, num_ranks: int, degree: int, capacity: int, lines: int
) -> Sends:
    """Compute `define_sends` by kernels. Unused entries of the results stay uninitialized."""
    offsets_E1, (tokens, k), local = layout.offsets_E1, layout.row_SK.shape, layout.experts // num_ranks
    tiles = max(1, triton.cdiv(tokens, TOKENS))
    padded = triton.next_power_of_2(degree)
    made = (num_ranks * capacity, num_ranks, 2 * (layout.experts + layout.rows), num_ranks * lines, num_ranks)
    single_launch = tokens * k <= ALONE
    counted = () if single_launch else (num_ranks * tokens, num_ranks * tiles * padded)
    *counts, token_WC, token_used_W, metadata, line_WC, line_used_W = _parts(offsets_E1, torch.int32, *counted, *made)
    sends = Sends(token_WC, token_used_W, metadata, line_WC, line_used_W)
    blocks = {"BLOCK": TOKENS, "LP": triton.next_power_of_2(local), "DP": padded}
    grid, row_SK = (tiles * num_ranks,), layout.row_SK.contiguous()
    if not single_launch:
        count_chunks_kernel[grid](
            row_SK, offsets_E1, *counts, tokens, k, num_ranks, local, degree, tiles, **blocks, num_warps=4
        )
    place_tokens_kernel[grid](
        row_SK, offsets_E1, None if weight_SK is None else weight_SK.contiguous(), *(counts or (None, None)), *sends,
        tokens, k, num_ranks, capacity, lines, local, degree, tiles,
        **blocks, TP=1 if single_launch else triton.next_power_of_2(tiles), WEIGHTED=weight_SK is not None, num_warps=4,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return sends


def _parts(like: Tensor, dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    """Allocate vectors in one block, each 16-byte aligned, as the kernels assume."""
    padded_sizes = [part for size in sizes for part in (size, -size % 4)]
    return list(like.new_empty(sum(padded_sizes), dtype=dtype).split(padded_sizes)[::2])


@triton.jit
def _write_row_addresses(
    address_ptr, target_ptr, table_ptr, own_ptr, staged_ptr, peer, place, number, kept, stored,
    step, places, row_bytes, SLOTS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Store row addresses for each slot of the peers' copies (`define_addresses`), slots `step` elements apart."""
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


@triton.jit
def _load_tiles(metadata_ptr, first, i, count, TILE: tl.constexpr, TP: tl.constexpr):
    """Return the token tile of each metadata line `first` + i; for i ≥ `count` TP − 1, the tile of no token."""
    token = tl.load(metadata_ptr + 2 * (first + i).to(tl.int64), mask=i < count, other=0)
    return tl.where(i < count, token // TILE, TP - 1)


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def sort_rows_kernel(
    metadata_ptr, position_ptr, L, local, W, bound,
    TILE: tl.constexpr, TP: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr,
    BLOCK: tl.constexpr = 512, OWN: tl.constexpr = 64,
):  # fmt: skip
    """Store the position of each metadata line's row if an expert's rows are sorted by arrival (`define_arrivals`).

    One program per expert and source. TP: more than the number of token tiles.
    """
    own_expert, own_source = tl.program_id(0) // W, tl.program_id(0) % W
    e, w = tl.arange(0, LP), tl.arange(0, WP)
    valid = (e < local)[:, None] & (w < W)[None, :]
    all_eW = tl.load(metadata_ptr + (w[None, :].to(tl.int64) * L + e[:, None]) * 2, mask=valid, other=0)
    first_eW = w[None, :] * L + local + tl.cumsum(all_eW, 0) - all_eW
    # As in `read_metadata_kernel`, rows beyond the bound have no position.
    end_eW = tl.reshape(tl.cumsum(tl.reshape(all_eW, (LP * WP,)), 0), (LP, WP))
    kept_eW = tl.minimum(end_eW, bound) - tl.minimum(end_eW - all_eW, bound)
    total_T = tl.zeros((TP,), tl.int32)
    before_T = tl.zeros((TP,), tl.int32)
    for source in range(0, W):
        pick = (e == own_expert)[:, None] & (w == source)[None, :]
        first, count = tl.sum(tl.where(pick, first_eW, 0)), tl.sum(tl.where(pick, kept_eW, 0))
        for start in range(0, count, BLOCK):
            number_T = tl.histogram(_load_tiles(metadata_ptr, first, start + tl.arange(0, BLOCK), count, TILE, TP), TP)
            total_T += number_T
            before_T += tl.where(source < own_source, number_T, 0)
    # Rows of earlier tiles, and rows of the same tile from earlier sources, precede this source's rows of a tile.
    preceding = tl.sum(tl.where((e < own_expert)[:, None], kept_eW, 0))
    next_T = preceding + tl.cumsum(tl.where(tl.arange(0, TP) < TP - 1, total_T, 0), 0) - total_T + before_T
    pick = (e == own_expert)[:, None] & (w == own_source)[None, :]
    first, count = tl.sum(tl.where(pick, first_eW, 0)), tl.sum(tl.where(pick, kept_eW, 0))
    for start in range(0, count, OWN):
        i = start + tl.arange(0, OWN)
        tiles = _load_tiles(metadata_ptr, first, i, count, TILE, TP)
        earlier = (tiles[None, :] == tiles[:, None]) & (i[None, :] < i[:, None])
        position = tl.gather(next_T, tiles, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(position_ptr + first + i, position, mask=i < count)
        next_T += tl.histogram(tiles, TP)


@jit(do_not_specialize=_DYNAMIC_ARGUMENTS)
def read_metadata_kernel(
    metadata_ptr,
    # Position of each line's row (`sort_rows_kernel`); None: by expert, source, and sender order.
    position_ptr,
    # Per chunk, concatenated: rows per expert, rows per peer.
    count_ptr, offsets_ptr, num_rows_ptr, counter_ptr, later_counter_ptr,
    source_ptr, place_ptr, weight_ptr, peer_ptr, pair_ptr,
    # Destinations of results and of values: all copies, this rank's, staging; and the addresses, slots concatenated.
    result_table_ptr, result_own_ptr, result_staged_ptr, result_ptr, result_target_ptr,
    value_table_ptr, value_own_ptr, value_staged_ptr, value_ptr, value_target_ptr,
    # Row tiles of LOWEST rows, chunks concatenated, then of twice the height, …: count and table (`find_tiles`).
    tiles_ptr,
    # Fault word, set to `number` beyond `most` rows; None to skip the check.
    fault_ptr, most, number,
    L, C, local, W, degree, bound, tiles, places, result_bytes, value_bytes,
    BLOCK: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr, SLOTS: tl.constexpr, FAR: tl.constexpr,
    LOWEST: tl.constexpr, HEIGHTS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    # A group is the rows of one expert from one source; groups are ordered by expert.
    e, w = tl.arange(0, LP), tl.arange(0, WP)
    valid = (e < local)[:, None] & (w < W)[None, :]
    head = metadata_ptr + (w[None, :].to(tl.int64) * L + e[:, None]) * 2
    all_eW = tl.load(head, mask=valid, other=0)
    first_eW = tl.load(head + 1, mask=valid, other=0)
    skipped_eW = (all_eW.to(tl.int64) * chunk // degree).to(tl.int32)
    count_eW = (all_eW.to(tl.int64) * (chunk + 1) // degree).to(tl.int32) - skipped_eW
    before_eW = tl.cumsum(all_eW, 0) - all_eW
    count_G = tl.reshape(count_eW, (LP * WP,))
    end_G = tl.cumsum(count_G, 0)
    kept = tl.sum(count_G, 0)
    # Offsets from a row's index to its index among its source's rows of the expert, to its metadata line, and to its
    # result row at the source.
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
    # Padding reads the first buffer row of source 0 and has no destination.
    is_kept, stored = row < kept, row < bound
    place = tl.where(is_kept, place, 0).to(tl.int64)
    line_ptr = metadata_ptr + 2 * line.to(tl.int64)
    token = tl.load(line_ptr, mask=is_kept, other=0)
    at = row
    if position_ptr is not None:
        at = tl.where(is_kept & stored, tl.load(position_ptr + line, mask=is_kept & stored, other=0), row)
    at = chunk.to(tl.int64) * bound + at
    tl.store(source_ptr + at, peer.to(tl.int64) * C + token, mask=stored)
    weight = tl.load(line_ptr + 1, mask=is_kept, other=0).to(tl.float32, bitcast=True)
    tl.store(weight_ptr + at, weight, mask=stored)
    tl.store(peer_ptr + at, tl.where(is_kept, peer, -1), mask=stored)
    tl.store(place_ptr + at, place, mask=stored)
    step = (tl.num_programs(0) // tiles).to(tl.int64) * bound
    _write_row_addresses(
        result_ptr, result_target_ptr, result_table_ptr, result_own_ptr, result_staged_ptr,
        peer, place, at, is_kept, stored, step, places, result_bytes, SLOTS, FAR,
    )  # fmt: skip
    _write_row_addresses(
        value_ptr, value_target_ptr, value_table_ptr, value_own_ptr, value_staged_ptr,
        peer, place, at, is_kept, stored, step, places, value_bytes, SLOTS, FAR,
    )  # fmt: skip
    if chunk == 0:
        tl.store(pair_ptr + row, row.to(tl.int64), mask=stored)
    # Rows beyond the bound are not computed, and no rank waits for them.
    inside_G = tl.minimum(end_G, bound) - tl.minimum(end_G - count_G, bound)
    inside_eW = tl.reshape(inside_G, (LP, WP))
    count_e = tl.sum(inside_eW, 1)
    end_e = tl.cumsum(count_e, 0)
    for height in tl.static_range(HEIGHTS):
        n_tiles = bound // (LOWEST << height) + local
        # The count and the table are 16-byte aligned.
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
        tl.store(num_rows_ptr + chunk * of_peers + w, tl.sum(inside_eW, 0), mask=w < W)
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
    results: ReturnBuffers,
    values: ReturnBuffers,
    heights: Sequence[int],
    limit: RowLimit | None = None,
    arrival_tile: int | None = None,
) -> list[ArrivedChunk]:
    """Decode routing metadata, as `define_arrivals`, `define_addresses` and `define_tiles`.

    Padding has source 0 and peer -1.

    Args:
        rows: upper bound on the rows of a chunk, rounded up to a multiple of four.
        results, values: destinations of the rows' results and of a scalar per row.
        heights: row-tile heights, each twice the previous one.
        limit: limit on the rows of all chunks; a fault is recorded beyond it.
        arrival_tile: as in `define_arrivals`; without remote peers.
    """
    assert arrival_tile is None or (degree == 1 and results.staging is None)
    peers, lines, _ = metadata_WC2.shape
    slots, rows_per_slot, _ = results.own.shape
    far, bound = results.staging is not None, -(-rows // 4) * 4
    blocks = {"LP": triton.next_power_of_2(experts), "WP": triton.next_power_of_2(peers)}
    block = num_rows_per_program(blocks["LP"] * blocks["WP"])
    tiles = max(1, triton.cdiv(bound, block))

    addresses = 2 * slots * (2 if far else 1)
    vectors = degree * (2 + addresses)
    *long, pair_R = _parts(metadata_WC2, torch.int64, *[experts] * degree, *[bound] * (vectors + 1))
    count, source, result_row, *addressed = (long[first : first + degree] for first in range(0, len(long), degree))
    weight = _parts(metadata_WC2, torch.float32, *[bound] * degree)
    lowest, *others = heights
    assert others == [lowest << 1 + number for number in range(len(others))]
    table_sizes = [size for height in heights for size in (1, 2 * tile_bound(bound, experts, height)) * degree]
    sizes = *[bound] * degree, *[experts + 1] * degree, *[peers] * degree * 3, *table_sizes
    short = _parts(metadata_WC2, torch.int32, *sizes)
    peer, offsets, num_rows, put_counter, later_put_counter = (
        short[first : first + degree] for first in range(0, 5 * degree, degree)
    )
    row_tiles = [Tiles(table.view(-1, 2), used) for used, table in zip(*[iter(short[5 * degree :])] * 2, strict=True)]
    stores, targets = addressed[: 2 * slots], addressed[2 * slots :]
    destinations = []
    for returned, first in ((results, 0), (values, slots)):
        own, staged, target = (returned.own, returned.staging, targets[first][0]) if far else (None, None, None)
        destinations.append((returned.table, own, staged, stores[first][0], target))
    position = None
    if arrival_tile is not None:
        position = metadata_WC2.new_empty(peers * lines)
        powers = {**blocks, "TP": triton.next_power_of_2(triton.cdiv(capacity, arrival_tile) + 1)}
        sort_rows_kernel[(experts * peers,)](
            metadata_WC2, position, lines, experts, peers, bound,
            TILE=arrival_tile, **powers, num_warps=4,
        )  # fmt: skip
    read_metadata_kernel[(tiles * degree,)](
        metadata_WC2, position,
        *(of[0] for of in (count, offsets, num_rows, put_counter, later_put_counter, source, result_row, weight, peer)),
        pair_R,
        *destinations[0], *destinations[1], row_tiles[0].used,
        *((None, 0, 0) if limit is None else (limit.fault_word, limit.max_rows, limit.message)),
        lines, capacity, experts, peers, degree, bound, tiles, rows_per_slot, results.row_bytes, values.row_bytes,
        BLOCK=block, **blocks, SLOTS=slots, FAR=far,
        LOWEST=lowest, HEIGHTS=len(heights), BT=block_sizes(experts)[1], num_warps=4,
    )  # fmt: skip
    row_R1, chunks = pair_R.view(-1, 1), []
    for chunk in range(degree):
        layout = Layout(count[chunk], offsets[chunk], source[chunk], pair_R, row_R1)
        addresses_of = [
            Addresses(peer[chunk], store[chunk], targets[number][chunk] if far else None, results.network)
            for number, store in enumerate(stores)
        ]
        arrivals = Arrivals(layout, weight[chunk], peer[chunk], result_row[chunk], num_rows[chunk])
        counters = put_counter[chunk], later_put_counter[chunk]
        of_chunk = dict(zip(heights, row_tiles[chunk::degree], strict=True))
        chunks.append(ArrivedChunk(arrivals, addresses_of[:slots], addresses_of[slots:], counters, of_chunk))
    return chunks


@jit
def take_rows_kernel(x_ptr, source_ptr, peer_ptr, rows_ptr, M, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.where(tl.load(peer_ptr + n) < 0, 0, M)
    x = tl.load(x_ptr + tl.load(source_ptr + n) * M + column, mask=column < kept, other=0)
    tl.store(rows_ptr + n * M + column, x, mask=column < M)


def copy_received_rows(x_CM: Tensor, chunks: Sequence[Arrivals]) -> list[Tensor]:
    """Copy the rows of all chunks out of a buffer slot in one launch: [R, M] per chunk, by expert; zeros in padding."""
    (peer_R, source_R), width = (chunks[0].peer_R, chunks[0].layout.source_N), x_CM.shape[1]
    x_DRM = x_CM.new_empty((len(chunks), len(peer_R), width))
    if x_DRM.numel():
        block, warps = columns(width)
        grid = (len(chunks) * len(peer_R), triton.cdiv(width, block))
        take_rows_kernel[grid](x_CM, source_R, peer_R, x_DRM, width, BLOCK=block, num_warps=warps)
    return list(x_DRM.unbind())


def num_rows_per_program(groups: int) -> int:
    return min(256, max(16, _COMPARISONS // groups))
