from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.placement.materialise import materialise, overlap_degree
from fusedmoe.placement.placement import Nodes, Placement
from tests.placement.placements import situations

LIMITS = st.tuples(st.integers(0, 8), st.integers(0, 5))


@settings(deadline=None)
@given(situations(), LIMITS)
def test_limits(case, limits):
    placement, tokens_WE, nodes = case
    t, m = limits
    after = materialise(placement, tokens_WE.sum(axis=0), nodes, t, m)
    assert placement.is_within(after) and after.owners == placement.owners
    new_W = after.extra_W() - placement.extra_W()
    assert (after.extra_W() <= np.maximum(m, placement.extra_W())).all(), "no rank exceeds its slots"
    assert (new_W <= t).all()
    travelling = [e for e in range(placement.experts) if after.replicas[e] != placement.replicas[e]]
    assert len(travelling) <= t


@settings(deadline=None)
@given(situations(replicas=False), st.integers(0, 8))
def test_with_room_for_all_the_top_experts_are_everywhere(case, t):
    placement, tokens_WE, nodes = case
    load_E = tokens_WE.sum(axis=0)
    after = materialise(placement, load_E, nodes, t, t + 1)
    assert after == materialise(placement, load_E, nodes, t, t)
    top = sorted(range(placement.experts), key=lambda e: (-load_E[e], e))[:t]
    for expert in range(placement.experts):
        assert after.holds_EW[expert].sum() == (nodes.ranks if expert in top else 1)


@settings(deadline=None)
@given(situations(replicas=False), LIMITS)
def test_slots_by_load(case, limits):
    """How many replicas each expert gets, by the definition; and a node without it goes first."""
    placement, tokens_WE, nodes = case
    t, m = min(limits[0], placement.experts), limits[1]
    if m >= t:
        return
    load_E = tokens_WE.sum(axis=0)
    after = materialise(placement, load_E, nodes, t, m)
    top = sorted(range(placement.experts), key=lambda e: (-load_E[e], e))[:t]
    left, slots = int(sum(load_E[e] for e in top)), nodes.ranks * m
    free_W = np.full(nodes.ranks, m)
    for expert in top:
        wanted = min(math.floor(slots * load_E[expert] / left + 0.5), nodes.ranks - 1) if left else 0
        others = [rank for rank in range(nodes.ranks) if rank != placement.owners[expert]]
        got = after.replicas[expert]
        assert len(got) == min(wanted, sum(free_W[rank] > 0 for rank in others))
        lacking = {nodes.of(r) for r in others if free_W[r] > 0} - {nodes.of(placement.owners[expert])}
        covered = {nodes.of(rank) for rank in got} - {nodes.of(placement.owners[expert])}
        assert len(covered) == min(len(got), len(lacking)), "nodes that lack it come first"
        free_W[list(got)] -= 1
        slots, left = slots - len(got), left - int(load_E[expert])


def test_by_hand():
    # Four slots for loads 60, 30 and 10: round(4·0.6) = 2, round(2·30/40) = 2, none are left.
    after = materialise(Placement.even(4, 4), [60, 30, 10, 0], Nodes(4, 2), t=3, m=1)
    # Expert 0: node 1 lacks it, and rank 3 has less to do there than rank 2. Then both nodes have it, and node 0 has
    # two free slots left, node 1 one. Expert 1 gets the last two.
    assert after == Placement.parse("0: 0 +1\n1: 1 +0\n2: 2 +1\n3: 3 +0")


def test_equal_places_go_to_who_has_less_to_do():
    # One replica of expert 0, on node 1; rank 2 owns the second largest.
    after = materialise(Placement.even(4, 4), [50, 0, 40, 0], Nodes(4, 2), t=2, m=1)
    assert 3 in after.replicas[0]


def test_experts_that_have_copies_share_their_load():
    placement = Placement.parse("0: 0\n1: 1 +0\n2: 2 +0\n3: +0")
    after = materialise(placement, [80, 30, 25], Nodes(4, 2), t=1, m=2)
    assert after.replicas == ((1, 2, 3), (0, 2, 3), ()), "80 over four copies are less than 30 for one"


def test_nothing_to_do():
    even = Placement.even(4, 8)
    for load_E, t, m in (([0] * 8, 3, 1), ([1] * 8, 0, 5), ([1] * 8, 5, 0)):
        assert materialise(even, load_E, Nodes(4, 2), t, m) == even
    alone = Placement.even(1, 3)
    assert materialise(alone, [3, 2, 1], Nodes(1, 1), 2, 1) == alone


def test_overlap_degree():
    assert overlap_degree(1e-3, 4_000_000, 12.5e9) == 3  # 12.5 MB in 1 ms
    assert overlap_degree(0.0, 1, 1e9) == 0
    assert overlap_degree(2.0, 3, 6.0) == 4
    for arguments in ((-1.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0), (math.inf, 1, 1.0), (math.nan, 1, 1.0)):
        with pytest.raises(ConfigError, match="overlap degree"):
            overlap_degree(*arguments)


@pytest.mark.parametrize(
    ("load_E", "ranks", "t", "m"),
    [
        ([1, 2], 4, 1, 1),
        ([1, 2, 3, 4], 8, 1, 1),
        ([1, -2, 3, 4], 4, 1, 1),
        ([1, math.nan, 3, 4], 4, 1, 1),
        ([1, 2, 3, 4], 4, -1, 1),
        ([1, 2, 3, 4], 4, 1, -1),
    ],
)
def test_what_is_refused(load_E, ranks, t, m):
    with pytest.raises(ConfigError, match="materialisation"):
        materialise(Placement.even(4, 4), load_E, Nodes(ranks, 2), t, m)
