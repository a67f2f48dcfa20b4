"""Plans of one-sided dispatch as kernels: what this rank puts, what has come, and where its results go.

Definitions: `define_sends`, `define_arrivals` in `fusedmoe/kernels/one_sided.py`, of some hundred operations in torch.
Here the first takes two launches, and the second one for each chunk.

Sends: (1) Each block of tokens finds, for each peer, the first chunk that needs each token, and counts them by chunk.
(2) Each block sums up the counts of the blocks before; a token's place is behind those of earlier chunks and, in its
own, of tokens before it. Rows are compared with the first rows of a peer's experts: no table of experts is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Arrivals, Sends
from fusedmoe.kernels.triton.jit import jit

#: Tokens of a block; a program compares each with all of a peer's experts.
TOKENS = 128
# Comparisons of a program that reads: of each row with all groups.
_COMPARISONS = 16384
_UNSPECIAL = ["S", "N", "degree", "chunk", "tiles", "bound"]


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


@jit(do_not_specialize=_UNSPECIAL)
def count_chunks_kernel(
    row_ptr, offsets_ptr, first_ptr, counts_ptr, S, K, W, local, degree, tiles,
    BLOCK: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """first [W, S]: of each token the first chunk that needs it, `degree` where none does; counts [W, tiles, DP]."""
    tile, peer = tl.program_id(0) // W, tl.program_id(0) % W
    start, count = _experts_of(offsets_ptr, peer, local, LP)
    s = tile * BLOCK + tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), 0, tl.int32) + degree
    for k in range(K):
        row = tl.load(row_ptr + s.to(tl.int64) * K + k, mask=s < S, other=-1).to(tl.int32)
        first = tl.minimum(first, _chunk_of(row, start, count, degree))
    tl.store(first_ptr + peer.to(tl.int64) * S + s, first, mask=s < S)
    d = tl.arange(0, DP)
    here = tl.sum(((first[:, None] == d[None, :]) & (d < degree)[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + (peer * tiles + tile) * DP + d, here)


@jit(do_not_specialize=_UNSPECIAL)
def place_tokens_kernel(
    row_ptr, offsets_ptr, weight_ptr, first_ptr, counts_ptr,
    token_ptr, token_used_ptr, metadata_ptr, line_ptr, line_used_ptr,
    S, K, W, C, L, local, degree, tiles,
    BLOCK: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, TP: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    tile, peer = tl.program_id(0) // W, tl.program_id(0) % W
    start, count = _experts_of(offsets_ptr, peer, local, LP)
    d, t, E = tl.arange(0, DP), tl.arange(0, TP), W * local
    counts = tl.load(counts_ptr + (peer * tiles + t)[:, None] * DP + d[None, :], mask=(t < tiles)[:, None], other=0)
    total = tl.sum(counts, 0)
    before = tl.cumsum(total, 0) - total + tl.sum(tl.where((t < tile)[:, None], counts, 0), 0)

    s = tile * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(first_ptr + peer.to(tl.int64) * S + s, mask=s < S, other=degree)
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
            weight = tl.load(weight_ptr + row, mask=here, other=0.0).to(tl.float32)
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


def plan_sends(layout: Layout, weight_N: Tensor | None, peers: int, degree: int, capacity: int, lines: int) -> Sends:
    """Plans what this rank puts, as `define_sends`; what nobody is sent stays unwritten."""
    offsets_E1, (tokens, k), local = layout.offsets_E1, layout.row_SK.shape, layout.experts // peers
    tiles = max(1, triton.cdiv(tokens, TOKENS))
    padded = triton.next_power_of_2(degree)
    numbers = offsets_E1.new_empty  # int32
    first_WS, counts = numbers((peers, tokens)), numbers((peers, tiles, padded))
    metadata, line_WC = numbers((layout.experts + layout.rows, 2)), numbers((peers, lines))
    sends = Sends(numbers((peers, capacity)), numbers(peers), metadata, line_WC, numbers(peers))
    blocks = {"BLOCK": TOKENS, "LP": triton.next_power_of_2(local), "DP": padded}
    grid, row_SK = (tiles * peers,), layout.row_SK.contiguous()
    count_chunks_kernel[grid](
        row_SK, offsets_E1, first_WS, counts, tokens, k, peers, local, degree, tiles, **blocks, num_warps=4
    )
    place_tokens_kernel[grid](
        row_SK, offsets_E1, weight_N, first_WS, counts, *sends,
        tokens, k, peers, capacity, lines, local, degree, tiles,
        **blocks, TP=triton.next_power_of_2(tiles), WEIGHTED=weight_N is not None, num_warps=4,
    )  # fmt: skip
    return sends


@jit(do_not_specialize=_UNSPECIAL)
def read_metadata_kernel(
    metadata_ptr, count_ptr, offsets_ptr, source_ptr, weight_ptr, peer_ptr, place_ptr, wanted_ptr,
    L, C, local, W, degree, chunk, bound,
    BLOCK: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
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

    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (row[:, None] >= (end_G - count_G)[None, :]) & (row[:, None] < end_G[None, :])
    peer = tl.sum(tl.where(mine, source_G[None, :], 0), 1)
    inside = row + tl.sum(tl.where(mine, inside_G[None, :], 0), 1)
    line = inside + tl.sum(tl.where(mine, line_G[None, :], 0), 1)
    place = inside + tl.sum(tl.where(mine, result_G[None, :], 0), 1)
    # Padding reads the first place of source 0, which exists.
    here, stored = row < kept, row < bound
    at = metadata_ptr + 2 * line.to(tl.int64)
    token = tl.load(at, mask=here, other=0)
    tl.store(source_ptr + row, peer.to(tl.int64) * C + token, mask=stored)
    tl.store(weight_ptr + row, tl.load(at + 1, mask=here, other=0).to(tl.float32, bitcast=True), mask=stored)
    tl.store(peer_ptr + row, peer, mask=stored)
    tl.store(place_ptr + row, tl.where(here, place, 0).to(tl.int64), mask=stored)
    if tl.program_id(0) == 0:
        count_e = tl.sum(count_eW, 1)
        tl.store(count_ptr + e, count_e.to(tl.int64), mask=e < local)
        tl.store(offsets_ptr + e + 1, tl.cumsum(count_e, 0), mask=e < local)
        tl.store(offsets_ptr, 0)
        tl.store(wanted_ptr + w, tl.sum(count_eW, 0), mask=w < W)


def read_metadata(
    metadata_WC2: Tensor, experts: int, degree: int, capacity: int, rows: Sequence[int]
) -> list[Arrivals]:
    """Reads what comes, as `define_arrivals`; padding is of source 0."""
    (peers, lines, _), device = metadata_WC2.shape, metadata_WC2.device
    blocks = {"LP": triton.next_power_of_2(experts), "WP": triton.next_power_of_2(peers)}
    block = rows_of_program(blocks["LP"] * blocks["WP"])
    chunks = []
    for chunk, bound in enumerate(rows):
        row_R = torch.arange(bound, device=device)
        source_R, place_R = (torch.empty_like(row_R) for _ in range(2))
        weight_R = torch.empty(bound, dtype=torch.float32, device=device)
        count_e = torch.empty(experts, dtype=torch.int64, device=device)
        peer_R, offsets_e1, wanted_W = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (bound, experts + 1, peers)
        )
        read_metadata_kernel[(max(1, triton.cdiv(bound, block)),)](
            metadata_WC2, count_e, offsets_e1, source_R, weight_R, peer_R, place_R, wanted_W,
            lines, capacity, experts, peers, degree, chunk, bound, BLOCK=block, **blocks, num_warps=4,
        )  # fmt: skip
        layout = Layout(count_e, offsets_e1, source_R, row_R, row_R.view(-1, 1))
        chunks.append(Arrivals(layout, weight_R, peer_R, place_R, wanted_W))
    return chunks


def rows_of_program(groups: int) -> int:
    """Returns how many rows a program reads, where there are so many groups; both are powers of two."""
    return min(256, max(16, _COMPARISONS // groups))
