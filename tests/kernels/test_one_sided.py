"""Who sends what where, compared with loops over tokens."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.autograd.order import order
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Arrivals, chunk_of, define_arrivals, define_sends, find_rows, for_all_shards


def ranges(count: int, degree: int) -> list[int]:
    return [chunk for chunk in range(degree) for _ in range(count * chunk // degree, count * (chunk + 1) // degree)]


@given(st.integers(1, 40), st.integers(1, 9))
def test_chunks_are_equal_shares(count: int, degree: int) -> None:
    found = chunk_of(torch.arange(count), torch.tensor(count), degree)
    assert found.tolist() == ranges(count, degree)


def route(seed: int, tokens: int, slots: int, experts: int, capacity: int | None) -> tuple[Layout, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    expert_SK = torch.rand(tokens, experts, generator=random).argsort(1)[:, :slots]
    expert_SK[torch.rand(tokens, slots, generator=random) < 0.2] = -1
    return order(expert_SK, experts, capacity), torch.rand(tokens, slots, generator=random)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_row_arrives_once(seed: int, peers: int, local: int, degree: int, slots: int, drops: bool) -> None:
    experts, slots = peers * local, min(slots, peers * local)
    random = torch.Generator().manual_seed(seed)
    most = 9
    tokens = torch.randint(0, most, (peers,), generator=random).tolist()
    capacity, lines = most, local + most * slots
    batches = [route(seed + p, count, slots, experts, 3 if drops else None) for p, count in enumerate(tokens)]
    sends = [define_sends(lay, w, peers, degree, capacity, lines) for lay, w in batches]

    # What each rank wants to know of (sender, sorted row): which token, its weight, in the receiver's order.
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
            assert count == len(chunk) == int(arrivals.wanted_W.sum()) == int(arrivals.layout.counts_E.sum())
            found = []
            for r in range(count):
                assert arrivals.layout.source_N is not None
                sender, place = divmod(int(arrivals.layout.source_N[r]), capacity)
                assert sender == int(arrivals.peer_R[r]) and place < int(sends[sender].token_used_W[me])
                token = int(sends[sender].token_WC[me, place])
                found.append((sender, token, float(arrivals.weight_R[r]), int(arrivals.place_R[r])))
            assert found == chunk
        # With room for fewer: the first of these.
        for chunk, arrivals in zip(
            wanted, define_arrivals(metadata, local, degree, capacity, [2] * degree), strict=True
        ):
            count = min(2, len(chunk))
            assert count == int(arrivals.layout.offsets_E1[-1]) == int(arrivals.layout.counts_E.sum())
            assert arrivals.peer_R[:count].tolist() == [sender for sender, *_ in chunk[:count]]
            assert arrivals.place_R[:count].tolist() == [place for *_, place in chunk[:count]]
            sent = [sum(sender == p for sender, *_ in chunk[:count]) for p in range(peers)]
            assert arrivals.wanted_W.tolist() == sent
        # Each token is sent once, in the order of the first chunk that needs it.
        for sender, send in enumerate(sends):
            used = send.token_WC[me, : int(send.token_used_W[me])].tolist()
            needed = [token for chunk in wanted for s, token, _, _ in chunk if s == sender]
            assert len(set(used)) == len(used) and set(used) == set(needed)
            firsts = [next(c for c, chunk in enumerate(wanted) if (sender, t) in {x[:2] for x in chunk}) for t in used]
            assert firsts == sorted(firsts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_other_chunks_of_the_same_rows(seed: int, peers: int, local: int, degree: int, other: int, drops: bool) -> None:
    """Tokens are in order for both numbers of chunks, and each row is found where the other chunks have it."""
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
        rows = [int(one.wanted_W.sum()) + more for one, more in zip(exact, padding, strict=True)]
        passes.append(define_arrivals(metadata, local, count, most, rows))
        # Nobody waits for a token that the sender puts behind those of a later chunk.
        first_of: list[dict[int, int]] = [{} for _ in tokens]
        for chunk, one in enumerate(passes[-1]):
            assert one.layout.source_N is not None
            for source in one.layout.source_N[: int(one.wanted_W.sum())].tolist():
                first_of[source // most].setdefault(source % most, chunk)
        for found in first_of:
            chunks = [found[place] for place in sorted(found)]
            assert chunks == sorted(chunks)

    def named(chunks: list[Arrivals]) -> list[list[tuple[int, int] | None]]:
        return [
            [
                (int(peer), int(place)) if row < int(one.wanted_W.sum()) else None
                for row, (peer, place) in enumerate(zip(one.peer_R, one.place_R, strict=True))
            ]
            for one in chunks
        ]

    there = [name for chunk in named(passes[0]) for name in chunk]
    found_rows = find_rows(*passes, peers, most * slots)
    for names, index in zip(named(passes[1]), found_rows, strict=True):
        assert len(index) == len(names)
        for name, row in zip(names, index.tolist(), strict=True):
            assert name is None or there[row] == name
            assert 0 <= row < max(1, len(there))


def test_all_shards() -> None:
    layout = order(torch.tensor([[1], [0], [-1], [1]]), 2)
    both = for_all_shards(layout, 3)
    assert both.counts == [1, 2] * 3
    assert both.row_SK.tolist() == [[1, 4, 7], [0, 3, 6], [-1, -1, -1], [2, 5, 8]]
    assert both.source_N is not None and both.source_N.tolist() == [1, 0, 3] * 3
    padded = for_all_shards(layout.padded(layout.rows + 2), 3)
    assert padded.counts == both.counts and padded.row_SK.tolist() == both.row_SK.tolist()
    assert padded.source_N is not None and padded.source_N[:9].tolist() == both.source_N.tolist()
    assert padded.pair_N[:9].tolist() == both.pair_N.tolist() and padded.rows == 3 * (layout.rows + 2)
    two = for_all_shards(order(torch.tensor([[1, 0], [0, -1]]), 2), 2)
    assert two.row_SK.tolist() == [[2, 5, 1, 4], [0, 3, -1, -1]] and two.pair_N.tolist() == [4, 2, 0, 5, 3, 1]
    groups = for_all_shards(order(torch.tensor([[2, 0], [0, -1], [3, 1]]), 4), 2, groups=2)
    assert groups.counts == [2, 1, 2, 1, 1, 1, 1, 1], "ranks of the first group, then of the second"
    assert groups.source_N is not None and groups.source_N.tolist() == [1, 0, 2, 1, 0, 2, 0, 2, 0, 2]
    assert groups.row_SK.tolist() == [[6, 8, 1, 4], [0, 3, -1, -1], [7, 9, 2, 5]]
    assert groups.pair_N.tolist() == [4, 2, 10, 5, 3, 11, 0, 8, 1, 9]
    assert for_all_shards(order(torch.tensor([[-1]]), 4), 2, groups=2).row_SK.tolist() == [[-1, -1]]
    for s, row in enumerate(both.row_SK.tolist()):
        for q, n in enumerate(row):
            assert n < 0 or int(both.pair_N[n]) == 3 * s + q
