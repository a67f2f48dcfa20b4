"""Placements as values: text, owners and replicas of experts, and refused placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import NodeLayout, Placement
from tests.placement.placements import MATERIALISED, SHARDING, situations


@settings(deadline=None)
@given(situations())
def test_parse_inverts_str(case):
    placement, _, _ = case
    again = Placement.parse(str(placement))
    assert again == placement and hash(again) == hash(placement) and str(again) == str(placement)
    assert np.array_equal(again.holds_EW, placement.holds_EW)


@settings(deadline=None)
@given(situations())
def test_each_expert_has_one_owner(case):
    placement, _, node_layout = case
    owned = [expert for rank in range(node_layout.num_ranks) for expert in placement.owned(rank)]
    assert sorted(owned) == list(range(placement.experts))
    assert placement.sharding.is_within(placement) and placement.is_within(placement)
    assert placement.extra_W().sum() == placement.holds_EW.sum() - placement.experts
    assert placement.is_within(placement.sharding) == (not any(placement.replicas))


def test_parse_accepts_comments_and_blank_lines():
    text = "\n# two of four\n0: 0 1 +2\n1: 2   # a comment\n\n2: 3 +2\n3:\n"
    placement = Placement.parse(text)
    assert placement == Placement(4, (0, 0, 1, 2), ((), (), (2, 0), ()))
    assert placement.replicas[2] == (0, 2) and str(placement) == "0: 0 1 +2\n1: 2\n2: 3 +2\n3:"
    assert placement != placement.sharding and placement.sharding == Placement(4, (0, 0, 1, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0: 0 1\n1: 1", "expert 1 has an owner already"),
        ("0: 0 0", "expert 0 has an owner already"),
        ("0: 0 +2\n1: 1", "expert 2 has no owner"),
        ("0: 0\n1: 99999999999999", "expert 1 has no owner"),
        ("0: 0 +0", "rank 0 owns expert 0"),
        ("0: 0\n1: +0 +0", "two replicas of expert 0"),
        ("1: 0", "line 1"),
        ("0: 0\n2: 1", "line 2"),
        ("0: 0 x", "is not '0: 0 1 +2'"),
        ("0 0", "line 1"),
        ("", "needs one of each"),
        ("0:", "needs one of each"),
    ],
)
def test_parse_error_names_line_and_expert(text, says):
    with pytest.raises(ConfigError, match=says.replace("+", r"\+")):
        Placement.parse(text)


def test_constructors_reject_invalid_ranks():
    with pytest.raises(ConfigError, match="expert 1 is on rank 4"):
        Placement(4, (0, 4))
    with pytest.raises(ConfigError, match="expert 0 is on rank -1"):
        Placement(4, (0, 1), ((-1,), ()))
    with pytest.raises(ConfigError, match="replicas of 1 experts"):
        Placement(4, (0, 1), ((1,),))
    for ranks, per_node in ((4, 3), (0, 1), (4, 0), (2, 4)):
        with pytest.raises(ConfigError, match="multiple"):
            NodeLayout(ranks, per_node)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 40))
def test_even_placement_differs_by_at_most_one_expert(ranks, experts):
    owners = Placement.even(ranks, experts).owners
    counts = np.bincount(owners, minlength=ranks)
    assert list(owners) == sorted(owners) and counts.max() - counts.min() <= 1


def test_holds_array_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        MATERIALISED.holds_EW[0, 0] = False
    assert SHARDING.is_within(MATERIALISED) and not MATERIALISED.is_within(SHARDING)
    assert not Placement(4, (1, 1, 2)).is_within(MATERIALISED), "another owner"
