"""`build_layout` compared with the definition of a layout, and its worked example."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.kernels.layout import build_layout, define_layout
from tests.kernels.routings import choose

cases = st.tuples(
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.one_of(st.none(), st.integers(0, 12)),
    st.booleans(),
)


@settings(deadline=None, max_examples=150)
@given(cases)
def test_layout_equals_its_definition(case: tuple[int, int, int, float, int | None, bool]) -> None:
    tokens, slots, more, empty, capacity, ranked = case
    expert_SK = choose(tokens, slots, slots + more, empty)
    # Few distinct priorities, to produce ties.
    priority_S = torch.randint(0, 4, (tokens,)).double() if ranked else None
    got = build_layout(expert_SK, slots + more, capacity, priority_S)
    expected = define_layout(expert_SK, slots + more, capacity, priority_S)
    for name in ("counts_E", "offsets_E1", "source_N", "pair_N", "row_SK"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_layout_of_worked_example() -> None:
    layout = build_layout(torch.tensor([[0, 1], [0, 1], [0, -1]]), 2, capacity=2)
    assert layout.counts == [2, 2] and layout.offsets_E1.tolist() == [0, 2, 4]
    assert layout.source_N is not None and layout.source_N.tolist() == [0, 1, 0, 1]
    assert layout.pair_N.tolist() == [0, 2, 1, 3]
    assert layout.row_SK.tolist() == [[0, 2], [1, 3], [-1, -1]]
