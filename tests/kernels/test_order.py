from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.kernels.order import (
    build_layout,
    contiguous_layout,
    define_gather_sum,
    define_layout,
    gather_sum,
    permute,
)


def choose(tokens: int, slots: int, experts: int, empty: float) -> torch.Tensor:
    """Random distinct experts for each token, some slots empty."""
    expert_SK = torch.rand(tokens, experts).argsort(1)[:, :slots]
    expert_SK[torch.rand(expert_SK.shape) < empty] = -1
    return expert_SK


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
    # Few distinct priorities, so that ties happen.
    priority_S = torch.randint(0, 4, (tokens,)).double() if ranked else None
    got = build_layout(expert_SK, slots + more, capacity, priority_S)
    expected = define_layout(expert_SK, slots + more, capacity, priority_S)
    for name in ("counts_E", "source_N", "slot_N", "row_SK"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_worked_example() -> None:
    layout = build_layout(torch.tensor([[0, 1], [0, 1], [0, -1]]), 2, capacity=2)
    assert layout.counts == [2, 2]
    assert layout.source_N is not None and layout.source_N.tolist() == [0, 1, 0, 1]
    assert layout.slot_N.tolist() == [0, 2, 1, 3]
    assert layout.row_SK.tolist() == [[0, 2], [1, 3], [-1, -1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "empty", "capacity"),
    [(37, 2, 5, 0.0, None), (37, 2, 5, 0.3, 6), (16, 1, 4, 0.0, None), (9, 3, 3, 1.0, None), (0, 2, 4, 0.0, None)],
)
def test_gather_sum(
    tokens: int, slots: int, experts: int, empty: float, capacity: int | None, weighted: bool, dtype: torch.dtype
) -> None:
    layout = build_layout(choose(tokens, slots, experts, empty), experts, capacity)
    rows_NM = torch.randn(layout.rows, 2 * 7).to(dtype)[:, ::2]
    weight_N = torch.rand(layout.rows) if weighted else None
    exact = define_gather_sum(rows_NM.double(), layout, None if weight_N is None else weight_N.double())
    got = gather_sum(rows_NM, layout, weight_N)
    assert got.dtype == dtype and got.shape == (tokens, 7)
    tolerance = {torch.float64: 1e-7 if weighted else 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    dropped = (layout.row_SK < 0).all(1)
    assert torch.equal(got[dropped], torch.zeros_like(got[dropped]))


def test_permute_and_contiguous() -> None:
    layout = build_layout(choose(11, 2, 4, 0.0), 4)
    x_SM = torch.randn(11, 3)
    assert layout.source_N is not None
    assert torch.equal(permute(x_SM, layout), x_SM[layout.source_N])
    plain = contiguous_layout(torch.tensor([4, 0, 7]), 11)
    assert permute(x_SM, plain) is x_SM and plain.counts == [4, 0, 7]
    weight_N = torch.rand(11)
    assert torch.equal(gather_sum(x_SM, plain, weight_N), x_SM * weight_N[:, None])
