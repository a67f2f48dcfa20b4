"""Where rows go by puts: each token once to every rank that has experts of its, and what is written to that rank.

The sender decides where in its room of the receiver's window a token lies, and tells in a letter: for each local expert
how many rows there are and where their results go, then for each row the token's place and its router weight. The
receiver sorts rows by expert, source and the sender's order, as the collectives' path does, and reads a token as often
as experts want it.

Worked example, two ranks of one expert each, degree 1: rank 0 has tokens a, b, c with experts {0, 1}, {1}, {1}. To rank
0 it puts a, to rank 1 a, b, c in places 0, 1, 2. Rank 1 reads in the letter: 3 rows of its expert, whose results go to
rows 1, 2, 3 of rank 0's results (row 0 there is expert 0's); then places 0, 1, 2 and the weights.

With more chunks tokens go in the order of the first chunk that needs them. Plain torch, no host synchronisation where
the number of rows is given as a bound. Definitions: tests/kernels/test_routes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.layout import Layout, offsets


class Sends(NamedTuple):
    """What a rank puts.

    Attributes:
        token_WC: int32, the token at each place of a peer's window; token_used_W: int32, how many there are.
        letter: [E + N, 2] int32, lines of all letters; line_WC, line_used_W: those of each peer.
    """

    token_WC: Tensor
    token_used_W: Tensor
    letter: Tensor
    line_WC: Tensor
    line_used_W: Tensor


class Arrivals(NamedTuple):
    """One chunk of what has been put here, sorted by local expert, then source, then the sender's order.

    Attributes:
        layout: `source_N` are rows of a slot of the window; slack may follow.
        weight_R: float32 router weights.   peer_R: int32, sources.   place_R: int64, the result's row there.
        wanted_W: int32, rows of each source.
    """

    layout: Layout
    weight_R: Tensor
    peer_R: Tensor
    place_R: Tensor
    wanted_W: Tensor


def chunk_of(place: Tensor, count: Tensor, degree: int) -> Tensor:
    """The chunk of an expert's i-th row of `count`, where chunk j has those from ⌊count·j/degree⌋ on."""
    return ((place + 1) * degree - 1).div(count.clamp(min=1), rounding_mode="floor").clamp(max=degree - 1)


def plan_sends(layout: Layout, weight_N: Tensor | None, peers: int, degree: int, capacity: int, lines: int) -> Sends:
    """What this rank puts.

    Args:
        layout: of its tokens over all E experts; rank p has those from p·E/peers on.
        weight_N: [N] router weight of each sorted row; None for 1.
        degree: chunks in which receivers compute; decides the order of tokens.
        capacity, lines: places that each rank has in a peer's windows of tokens and of lines.
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
    slot_N = torch.where(kept_N, layout.source_N * peers + peer_N, tokens * peers)
    first = torch.full((tokens * peers + 1,), degree, device=device).scatter_reduce(0, slot_N, chunk_N, "amin")
    first_SW = first[:-1].view(tokens, peers)
    token_SW = first_SW.argsort(dim=0, stable=True)
    place_SW = torch.empty_like(token_SW).scatter_(0, token_SW, _rows_like(token_SW))
    token_WC = torch.zeros((peers, capacity), dtype=torch.int32, device=device)
    token_WC[:, :tokens] = token_SW.t()

    start_E = layout.offsets_E1[:-1]
    head = torch.stack([layout.counts_E.to(torch.int32), start_E], 1)
    place_N = place_SW.view(-1)[slot_N.clamp(max=max(tokens * peers - 1, 0))] if tokens else row_N
    weight = torch.ones(rows, device=device) if weight_N is None else weight_N.float()
    body = torch.stack([place_N.to(torch.int32), weight.contiguous().view(torch.int32)], 1)
    count_W = layout.counts_E.view(peers, local).sum(1)
    line = torch.arange(lines, device=device)
    own_W1 = torch.arange(peers, device=device)[:, None]
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


def read_letters(letters_WC2: Tensor, experts: int, degree: int, capacity: int, rows: Sequence[int]) -> list[Arrivals]:
    """What has been put here, chunk by chunk.

    Args:
        letters_WC2: int32, all ranks' letters.
        experts: of this rank.
        capacity: places of each source in a window's slot.
        rows: of each chunk, or bounds on them.
    """
    peers, device = letters_WC2.shape[0], letters_WC2.device
    counts_We, start_We = letters_WC2[:, :experts, 0].long(), letters_WC2[:, :experts, 1].long()
    before_We = counts_We.cumsum(1) - counts_We
    flat = letters_WC2.view(peers * letters_WC2.shape[1], 2)
    found = []
    for chunk, bound in enumerate(rows):
        skipped_We = counts_We * chunk // degree
        count_eW = (counts_We * (chunk + 1) // degree - skipped_We).t()
        end_G = count_eW.reshape(-1).cumsum(0)
        row_R = torch.arange(bound, device=device)
        group_R = torch.searchsorted(end_G, row_R, right=True).clamp(max=end_G.numel() - 1)
        inside_R = row_R - (end_G - count_eW.reshape(-1))[group_R]
        expert_R, peer_R = group_R // peers, group_R % peers
        inside_R = inside_R + skipped_We[peer_R, expert_R]
        line_R = peer_R * letters_WC2.shape[1] + experts + before_We[peer_R, expert_R] + inside_R
        kept_R = row_R < end_G[-1]
        line = flat[torch.where(kept_R, line_R, 0)]
        source_R = peer_R * capacity + torch.where(kept_R, line[:, 0].long(), 0)
        count_e = count_eW.sum(1)
        layout = Layout(count_e, offsets(count_e), source_R, row_R, row_R.view(-1, 1))
        weight_R = line[:, 1].contiguous().view(torch.float32)
        place_R = start_We[peer_R, expert_R] + inside_R
        found.append(Arrivals(layout, weight_R, peer_R.to(torch.int32), place_R, count_eW.sum(0, dtype=torch.int32)))
    return found


def contiguous(arrivals: Arrivals) -> Layout:
    """The layout once the rows have been copied out of the window in its order."""
    return replace(arrivals.layout, source_N=None)


def _rows_like(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None].expand_as(x)


def for_all_shards(layout: Layout, shards: int) -> Layout:
    """The layout by which every row goes to all shards of its expert, and the shards' results are added up in order.

    Args:
        layout: without slack, over the e experts of which each of the `shards` ranks has a part.
    Returns:
        over shards·e experts, those of rank q from q·e on; slot k of a token becomes slots k·shards + q.
    """
    assert layout.source_N is not None
    rows, shard_Q1 = layout.rows, torch.arange(shards, device=layout.counts_E.device)[:, None]
    counts_E = layout.counts_E.repeat(shards)
    row_SKQ = torch.where(layout.row_SK[..., None] < 0, -1, layout.row_SK[..., None] + shard_Q1.view(-1) * rows)
    slot_N = (layout.slot_N * shards + shard_Q1).view(-1)
    return Layout(counts_E, offsets(counts_E), layout.source_N.repeat(shards), slot_N, row_SKQ.flatten(1))
