"""`gather_sum`, `permute` and pair operators in plain PyTorch compared with their definitions."""

from __future__ import annotations

import pytest
import torch

from fusedmoe.kernels.gather_sum import (
    define_gather_sum,
    gather_sum,
    permute,
    put_pairs,
    take_pairs,
)
from fusedmoe.kernels.layout import build_layout, contiguous_layout
from tests.kernels.routings import choose


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "empty", "capacity"),
    [(37, 2, 5, 0.0, None), (37, 2, 5, 0.3, 6), (16, 1, 4, 0.0, None), (9, 3, 3, 1.0, None), (0, 2, 4, 0.0, None)],
)
def test_gather_sum_equals_definition(
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


def test_permute_of_contiguous_layout_is_identity() -> None:
    layout = build_layout(choose(11, 2, 4, 0.0), 4)
    x_SM = torch.randn(11, 3)
    assert layout.source_N is not None
    assert torch.equal(permute(x_SM, layout), x_SM[layout.source_N])
    plain = contiguous_layout(torch.tensor([4, 0, 7]), 11)
    assert permute(x_SM, plain) is x_SM and plain.counts == [4, 0, 7]
    weight_N = torch.rand(11)
    assert torch.equal(gather_sum(x_SM, plain, weight_N), x_SM * weight_N[:, None])
    assert plain.offsets_E1.tolist() == [0, 4, 4, 11]


def test_integers_are_summed_exactly() -> None:
    layout = build_layout(choose(37, 3, 9, 0.2), 9, 12)
    rows_NM = torch.randint(-(2**40), 2**40, (layout.rows, 5))
    assert torch.equal(gather_sum(rows_NM, layout), define_gather_sum(rows_NM, layout))


@pytest.mark.parametrize(("tokens", "capacity"), [(0, None), (21, None), (21, 4), (21, 0)])
def test_put_pairs_is_adjoint_of_take_pairs(tokens: int, capacity: int | None) -> None:
    layout = build_layout(choose(tokens, 3, 6, 0.2), 6, capacity)
    a_SK, b_N = torch.randn(tokens, 3).double(), torch.randn(layout.rows).double()
    torch.testing.assert_close((take_pairs(a_SK, layout) * b_N).sum(), (a_SK * put_pairs(b_N, layout)).sum())
