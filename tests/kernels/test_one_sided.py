"""Source and destination of each sent row, compared with loops over tokens."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.autograd.order import order
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Arrivals, chunk_of, define_arrivals, define_sends, expand_to_shards, match_rows


def ranges(count: int, degree: int) -> list[int]:
    return [chunk for chunk in range(degree) for _ in range(count * chunk // degree, count * (chunk + 1) // degree)]


@given(st.integers(1, 40), st.integers(1, 9))
def test_chunk_of_gives_equal_shares(count: int, degree: int) -> None:
    found = chunk_of(torch.arange(count), torch.tensor(count), degree)
    assert found.tolist() == ranges(count, degree)


def route(seed: int, tokens: int, slots: int, experts: int, capacity: int | None) -> tuple[Layout, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    expert_SK = torch.rand(tokens, experts, generator=random).argsort(1)[:, :slots]
    expert_SK[torch.rand(tokens, slots, generator=random) < 0.2] = -1
    return order(expert_SK, experts, capacity), torch.rand(tokens, slots, generator=random)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_row_is_received_once(seed: int, peers: int, local: int, degree: int, slots: int, drops: bool) -> None:
    experts, slots = peers * local, min(slots, peers * local)
    random = torch.Generator().manual_seed(seed)
    most = 9
    tokens = torch.randint(0, most, (peers,), generator=random).tolist()
    capacity, lines = most, local + most * slots
    batches = [route(seed + p, count, slots, experts, 3 if drops else None) for p, count in enumerate(tokens)]
    sends = [define_sends(lay, w, peers, degree, capacity, lines) for lay, w in batches]

    # For each rank and each (sender, sorted row): the token and its weight, in the receiver's order.
    for me in range(peers):
        metadata = torch.full((peers, lines, 2), -7, dtype=torch.int32)
        for sender, send in enumerate(sends):
            used = int(send.line_used_W[me])
            metadata[sender, :used] = send.metadata[send.line_WC[me, :used].long()]
        wanted: list[list[tuple[int, int, float, int]]] = [[] for _ in range(degree)]
        for e in range(me * local, (me + 1) * local):
            for sender, (layout, weight_SK) in enumerate(batches):
                first, count = int(layout.offsets_E1[e]), layout.counts[e]
                for i, chunk in enumerate(ranges(count, degree)):
                    assert layout.source_N is not None
                    n = first + i
                    weight = float(weight_SK.reshape(-1)[layout.pair_N[n]])
                    wanted[chunk].append((sender, int(layout.source_N[n]), weight, n))
        rows = [len(chunk) + 3 for chunk in wanted]  # bounds
        for chunk, arrivals in zip(wanted, define_arrivals(metadata, local, degree, capacity, rows), strict=True):
            count = int(arrivals.layout.offsets_E1[-1])
            assert count == len(chunk) == int(arrivals.num_rows_W.sum()) == int(arrivals.layout.counts_E.sum())
            found = []
            for r in range(count):
                assert arrivals.layout.source_N is not None
                sender, place = divmod(int(arrivals.layout.source_N[r]), capacity)
                assert sender == int(arrivals.peer_R[r]) and place < int(sends[sender].token_used_W[me])
                token = int(sends[sender].token_WC[me, place])
                found.append((sender, token, float(arrivals.weight_R[r]), int(arrivals.result_row_R[r])))
            assert found == chunk
        # With less room: the first rows.
        for chunk, arrivals in zip(
            wanted, define_arrivals(metadata, local, degree, capacity, [2] * degree), strict=True
        ):
            count = min(2, len(chunk))
            assert count == int(arrivals.layout.offsets_E1[-1]) == int(arrivals.layout.counts_E.sum())
            assert arrivals.peer_R[:count].tolist() == [sender for sender, *_ in chunk[:count]]
            assert arrivals.result_row_R[:count].tolist() == [place for *_, place in chunk[:count]]
            sent = [sum(sender == p for sender, *_ in chunk[:count]) for p in range(peers)]
            assert arrivals.num_rows_W.tolist() == sent
        # Each token is sent once, in the order of the first chunk that needs it.
        for sender, send in enumerate(sends):
            used = send.token_WC[me, : int(send.token_used_W[me])].tolist()
            needed = [token for chunk in wanted for s, token, _, _ in chunk if s == sender]
            assert len(set(used)) == len(used) and set(used) == set(needed)
            firsts = [next(c for c, chunk in enumerate(wanted) if (sender, t) in {x[:2] for x in chunk}) for t in used]
            assert firsts == sorted(firsts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_rechunked_chunks_index_same_rows(
    seed: int, peers: int, local: int, degree: int, other: int, drops: bool
) -> None:
    """Tokens are in send order for both chunk counts, and each row's index in the other chunking is correct."""
    slots, most = min(2, peers * local), 9
    lines, random = local + most * slots, torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, most, (peers,), generator=random).tolist()
    batches = [route(seed + p, count, slots, peers * local, 3 if drops else None) for p, count in enumerate(tokens)]
    sends = [define_sends(lay, None, peers, math.lcm(degree, other), most, lines) for lay, _ in batches]
    metadata = torch.full((peers, lines, 2), -7, dtype=torch.int32)
    for sender, send in enumerate(sends):
        used = int(send.line_used_W[0])
        metadata[sender, :used] = send.metadata[send.line_WC[0, :used].long()]
    passes = []
    for count in (degree, other):
        padding = torch.randint(0, 4, (count,), generator=random).tolist()
        exact = define_arrivals(metadata, local, count, most, [peers * most * slots] * count)
        rows = [int(one.num_rows_W.sum()) + more for one, more in zip(exact, padding, strict=True)]
        passes.append(define_arrivals(metadata, local, count, most, rows))
        # No chunk waits for a token that the sender puts after those of a later chunk.
        first_of: list[dict[int, int]] = [{} for _ in tokens]
        for chunk, one in enumerate(passes[-1]):
            assert one.layout.source_N is not None
            for source in one.layout.source_N[: int(one.num_rows_W.sum())].tolist():
                first_of[source // most].setdefault(source % most, chunk)
        for found in first_of:
            chunks = [found[place] for place in sorted(found)]
            assert chunks == sorted(chunks)

    def named(chunks: list[Arrivals]) -> list[list[tuple[int, int] | None]]:
        return [
            [
                (int(peer), int(place)) if row < int(one.num_rows_W.sum()) else None
                for row, (peer, place) in enumerate(zip(one.peer_R, one.result_row_R, strict=True))
            ]
            for one in chunks
        ]

    there = [name for chunk in named(passes[0]) for name in chunk]
    found_rows = match_rows(*passes, peers, most * slots)
    for names, index in zip(named(passes[1]), found_rows, strict=True):
        assert len(index) == len(names)
        for name, row in zip(names, index.tolist(), strict=True):
            assert name is None or there[row] == name
            assert 0 <= row < max(1, len(there))


def test_expand_to_shards_repeats_layout() -> None:
    layout = order(torch.tensor([[1], [0], [-1], [1]]), 2)
    both = expand_to_shards(layout, 3)
    assert both.counts == [1, 2] * 3
    assert both.row_SK.tolist() == [[1, 4, 7], [0, 3, 6], [-1, -1, -1], [2, 5, 8]]
    assert both.source_N is not None and both.source_N.tolist() == [1, 0, 3] * 3
    padded = expand_to_shards(layout.padded(layout.rows + 2), 3)
    assert padded.counts == both.counts and padded.row_SK.tolist() == both.row_SK.tolist()
    assert padded.source_N is not None and padded.source_N[:9].tolist() == both.source_N.tolist()
    assert padded.pair_N[:9].tolist() == both.pair_N.tolist() and padded.rows == 3 * (layout.rows + 2)
    two = expand_to_shards(order(torch.tensor([[1, 0], [0, -1]]), 2), 2)
    assert two.row_SK.tolist() == [[2, 5, 1, 4], [0, 3, -1, -1]] and two.pair_N.tolist() == [4, 2, 0, 5, 3, 1]
    groups = expand_to_shards(order(torch.tensor([[2, 0], [0, -1], [3, 1]]), 4), 2, groups=2)
    assert groups.counts == [2, 1, 2, 1, 1, 1, 1, 1], "ranks of the first group, then of the second"
    assert groups.source_N is not None and groups.source_N.tolist() == [1, 0, 2, 1, 0, 2, 0, 2, 0, 2]
    assert groups.row_SK.tolist() == [[6, 8, 1, 4], [0, 3, -1, -1], [7, 9, 2, 5]]
    assert groups.pair_N.tolist() == [4, 2, 10, 5, 3, 11, 0, 8, 1, 9]
    assert expand_to_shards(order(torch.tensor([[-1]]), 4), 2, groups=2).row_SK.tolist() == [[-1, -1]]
    for s, row in enumerate(both.row_SK.tolist()):
        for q, n in enumerate(row):
            assert n < 0 or int(both.pair_N[n]) == 3 * s + q


def test_rows_of_an_expert_are_sorted_by_arrival() -> None:
    """Sort by token tile, source and sender order; the bound keeps the same rows as without sorting."""
    peers, local, slots, tokens, tile = 3, 2, 2, 11, 4
    lines = local + tokens * slots
    batches = [route(p, tokens, slots, peers * local, None) for p in range(peers)]
    sends = [define_sends(layout, None, peers, 1, tokens, lines) for layout, _ in batches]
    metadata = torch.zeros((peers, lines, 2), dtype=torch.int32)
    for sender, send in enumerate(sends):
        used = int(send.line_used_W[0])
        metadata[sender, :used] = send.metadata[send.line_WC[0, :used].long()]
    total = int(metadata[:, :local, 0].sum())
    for bound in (total + 3, total - 2):
        (plain,) = define_arrivals(metadata, local, 1, tokens, [bound])
        (found,) = define_arrivals(metadata, local, 1, tokens, [bound], tile)
        assert found.layout.counts_E.tolist() == plain.layout.counts_E.tolist()
        assert found.num_rows_W.tolist() == plain.num_rows_W.tolist()
        for start, end in itertools.pairwise(plain.layout.offsets_E1.tolist()):
            rows = sorted(range(start, end), key=lambda r: int(plain.layout.source_N[r]) % tokens // tile)  # type: ignore[index]
            for name in ("peer_R", "result_row_R", "weight_R"):
                assert getattr(found, name)[start:end].tolist() == getattr(plain, name)[rows].tolist()
