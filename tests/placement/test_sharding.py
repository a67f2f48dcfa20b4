from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.placement.loads import make_loads
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.price import load
from fusedmoe.placement.sharding import Move, moves, reshard, slots
from tests.placement.placements import nodes as any_nodes


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Placement], np.ndarray, Nodes, int]:
    where = draw(any_nodes)
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        shardings = [Placement.even(where.ranks, experts)] * layers
    else:  # as many of one rank as it has slots
        room = np.repeat(np.arange(where.ranks), slots(layers, experts, where.ranks))
        owners_LE = rng.permutation(room)[: layers * experts].reshape(layers, experts)
        shardings = [Placement(where.ranks, tuple(owners)) for owners in owners_LE.tolist()]
    most = draw(st.sampled_from((0, 3, 1000)))
    return shardings, rng.integers(0, most + 1, (layers, experts)), where, draw(st.integers(0, 8))


@settings(deadline=None)
@given(models())
def test_slots(case):
    shardings, load_LE, where, t = case
    after = reshard(shardings, load_LE, where, t)
    assert [one.experts for one in after] == [one.experts for one in shardings]
    assert not any(any(one.replicas) for one in after)
    owned_W = sum(np.bincount(one.owners, minlength=where.ranks) for one in after)
    assert owned_W.max() <= slots(len(after), after[0].experts, where.ranks)


@settings(deadline=None)
@given(models())
def test_underloaded_experts_by_the_paper(case):
    """Lines 5 to 14 of Algorithm 2, in plain loops."""
    shardings, load_LE, where, t = case
    layers, experts = load_LE.shape
    after = reshard(shardings, load_LE, where, t)
    free = [slots(layers, experts, where.ranks)] * where.ranks
    under = [sorted(range(experts), key=lambda e, of=of: (-of[e], e))[t:] for of in load_LE.tolist()]
    for layer in sorted(range(layers), key=lambda n: (-max((load_LE[n, e] for e in under[n]), default=0), n)):
        work = [0] * where.ranks
        for expert in under[layer]:
            ranks = [rank for rank in range(where.ranks) if free[rank]]

            def node_key(n: int) -> tuple:
                inside = range(n * where.per_node, (n + 1) * where.per_node)
                return sum(work[r] for r in inside), sum(free[r] for r in inside), n  # noqa: B023

            node = min({where.of(rank) for rank in ranks}, key=node_key)
            rank = min((r for r in ranks if where.of(r) == node), key=lambda r: (work[r], free[r], r))  # noqa: B023
            assert after[layer].owners[expert] == rank
            work[rank] += load_LE[layer, expert]
            free[rank] -= 1


@settings(deadline=None)
@given(models())
def test_moves_lead_from_one_to_the_other(case):
    shardings, load_LE, where, t = case
    after = reshard(shardings, load_LE, where, t)
    owners = [list(one.owners) for one in shardings]
    for layer, expert, source, target in moves(shardings, after):
        assert owners[layer][expert] == source != target
        owners[layer][expert] = target
    assert [tuple(one) for one in owners] == [one.owners for one in after]


@settings(deadline=None)
@given(models())
def test_the_same_again_is_no_change(case):
    shardings, load_LE, where, t = case
    once = reshard(shardings, load_LE, where, t)
    twice = reshard(once, load_LE, where, 0)
    again = reshard(twice, load_LE, where, 0)
    assert again == twice and moves(twice, again) == ()
    assert all(new is old for new, old in zip(again, twice, strict=True))


def test_by_hand():
    # Two layers of three experts on 2 × 1 ranks: 3 slots each. t = 1: experts 0 travel.
    even = [Placement(2, (0, 0, 1))] * 2
    after = reshard(even, [[90, 6, 4], [80, 15, 5]], Nodes(2, 1), 1)
    # Layer 1 first, as 15 > 6: expert 1 to rank 0, 2 to rank 1. Then layer 0: rank 0 and 1 alike. One slot each is
    # left: layer 0's expert 0 stays on rank 0; layer 1's cannot, and goes to rank 1.
    assert [one.owners for one in after] == [(0, 0, 1), (1, 0, 1)]
    assert moves(even, after) == (Move(1, 0, 0, 1),)


def test_even_work_and_ingress_of_what_nobody_copies():
    """What the paper wants it for: no rank owns two of the larger ones, no node only small ones."""
    nodes = Nodes(16, 4)
    trace = make_loads(1, 12, 16, 32, seed=1)
    even, load_LE = [Placement.even(16, 32)] * 12, trace.load_ILE[0]
    tokens_LWE = trace.tokens_ILWE[0].copy()
    for layer, top in enumerate(np.argsort(-load_LE, axis=1)[:, :8]):
        tokens_LWE[layer][:, top] = 0
    work, ingress = (
        [
            sum(getattr(load(tokens, one, nodes), name).max() for tokens, one in zip(tokens_LWE, of, strict=True))
            for of in (even, reshard(even, load_LE, nodes, 8))
        ]
        for name in ("work_W", "ingress_W")
    )
    assert work[1] < 0.8 * work[0] and ingress[1] < 0.8 * ingress[0]


def test_what_is_refused():
    even, nodes = [Placement.even(4, 4)] * 2, Nodes(4, 2)
    for shardings, load_LE, where in (
        (even, np.ones((1, 4)), nodes),
        (even, np.ones((2, 5)), nodes),
        (even, np.ones((2, 4)), Nodes(8, 2)),
        (even, -np.ones((2, 4)), nodes),
        ([even[0], Placement.even(4, 5)], np.ones((2, 4)), nodes),
        ([even[0], Placement.parse("0: 0 1\n1: 2 3 +0\n2:\n3:")], np.ones((2, 4)), nodes),
        ([], np.ones((0, 4)), nodes),
    ):
        with pytest.raises(ConfigError, match="sharding"):
            reshard(shardings, load_LE, where, 1)
    with pytest.raises(ConfigError, match="moves"):
        moves(even, even[:1])
