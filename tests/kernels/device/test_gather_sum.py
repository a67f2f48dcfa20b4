from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.gather_sum import define_gather_sum, define_permute, gather_sum, permute, put_pairs, take_pairs
from fusedmoe.kernels.layout import build_layout, define_layout
from tests.kernels.routings import choose
from tests.marks import interpreted_slowly


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "empty", "capacity", "dim"),
    [
        (0, 2, 7, 0.0, None, 100),
        (1, 1, 1, 0.0, None, 1),
        (1, 8, 64, 0.0, None, 512),
        (37, 3, 7, 0.3, 9, 100),
        (37, 10, 64, 0.0, 4, 100),
        (37, 16, 128, 0.2, None, 1),
        (37, 2, 7, 1.0, None, 100),
        (37, 2, 7, 0.0, 0, 100),
        (60, 2, 7, 0.0, None, 1500),
        (101, 1, 8, 0.0, 20, 300),
    ],
)
@pytest.mark.parametrize(
    ("weighted", "dtype"),
    [(True, torch.float32), *interpreted_slowly((False, torch.float32), (False, torch.float64), (True, torch.float64))],
    ids=str,
)
def test_gather_sum_equals_definition(
    tokens: int,
    slots: int,
    experts: int,
    empty: float,
    capacity: int | None,
    dim: int,
    weighted: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layout = build_layout(choose(tokens, slots, experts, empty).to(device), experts, capacity)
    rows_NM = torch.randn(layout.rows, dim, device=device, dtype=dtype)
    weight_N = torch.rand(layout.rows, device=device, dtype=dtype) if weighted else None
    rows = int(layout.offsets_E1[-1])
    for poisoned in (rows_NM, weight_N) if weight_N is not None else (rows_NM,):
        poisoned[rows:] = float("nan")  # slack
    exact = define_gather_sum(rows_NM.double(), layout, None if weight_N is None else weight_N.double())
    got = gather_sum(rows_NM, layout, weight_N)
    assert got.dtype == dtype and got.shape == (tokens, dim)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-15
    assert (got.double() - exact).norm() <= tolerance * exact.norm()
    dropped = (layout.row_SK < 0).all(1)
    assert torch.equal(got[dropped], torch.zeros_like(got[dropped]))


def test_gather_sum_adds_in_slot_order(device: torch.device) -> None:
    """(1 + ε) − 1 depends on the order in which float32 values are added."""
    layout = build_layout(choose(20, 3, 8).to(device), 8)
    value_SK = torch.tensor([1e8, 1.0, -1e8], device=device)[torch.rand(20, 3, device=device).argsort(1)]
    rows_NM = take_pairs(value_SK, layout)[:, None].expand(-1, 5)
    expected = (value_SK[:, 0] + value_SK[:, 1]) + value_SK[:, 2]
    assert torch.equal(gather_sum(rows_NM, layout), expected[:, None].expand(-1, 5))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    layout = build_layout(choose(37, 8, 16).to(device), 16)
    rows_NM = torch.randn(layout.rows, 64, device=device).to(dtype)
    weight_N = torch.rand(layout.rows, device=device).to(weight_dtype)
    exact = define_gather_sum(rows_NM.double(), layout, weight_N.double())
    # One rounding at the end (the interpreter truncates); bf16 sums would be off by several roundings.
    units = (gather_sum(rows_NM, layout, weight_N).double() - exact).abs() / exact.abs().clamp(min=1e-3)
    assert units.max() <= torch.finfo(dtype).eps * 1.01


def test_gather_sum_of_strided_rows_and_integers(device: torch.device) -> None:
    layout = build_layout(choose(37, 3, 9, 0.2).to(device), 9, 12)
    wide = torch.randn(2 * layout.rows, 90, device=device)
    weight_N = torch.rand(2 * layout.rows, device=device)[::2]
    for rows_NM in (wide[::2, 20:70], wide[: layout.rows, ::3], wide[: layout.rows].t().contiguous().t()):
        exact = define_gather_sum(rows_NM.double(), layout, weight_N.double())
        assert (gather_sum(rows_NM, layout, weight_N) - exact).norm() <= 1e-6 * exact.norm()
    integers = torch.randint(-(2**40), 2**40, (layout.rows, 5), device=device)
    assert torch.equal(gather_sum(integers, layout), define_gather_sum(integers, layout))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint8, *interpreted_slowly(torch.float32, torch.float64)], ids=str
)
@pytest.mark.parametrize(("tokens", "dim"), [(0, 5), (1, 1), (37, 100), (9, 1500)])
def test_permute_equals_definition(tokens: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    layout = build_layout(choose(tokens, 2, 5, 0.2).to(device), 5, 8)
    x_SM = (torch.randn(tokens, 2 * dim, device=device) * 100).to(dtype)[:, ::2]
    got = permute(x_SM, layout)
    assert got.dtype == dtype and torch.equal(got, define_permute(x_SM, layout))


def values(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(sizes, device=device) * 100).abs().to(dtype)


def exact(value: Tensor) -> list[object]:
    """Round-trip values of any dtype for exact comparison."""
    return list(value.cpu().to(torch.complex128).reshape(-1).tolist())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize(("tokens", "capacity"), [(0, None), (37, 4), (300, None)])
def test_take_pairs_and_put_pairs_round_trip(
    tokens: int, capacity: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    expert_SK = choose(tokens, 3, 6, 0.2)
    layout, right = build_layout(expert_SK.to(device), 6, capacity), define_layout(expert_SK, 6, capacity)
    for value_SK in (values((tokens, 3), dtype, device), values((3, tokens), dtype, device).t()):
        value_N = take_pairs(value_SK, layout)
        assert value_N.dtype == dtype and value_N.shape == (layout.rows,)
        flat = exact(value_SK)
        assert exact(value_N) == [flat[pair] for pair in right.pair_N.tolist()] + [0] * (layout.rows - right.rows)
        strided_N = torch.stack([value_N, value_N], 1)[:, 1]
        strided_N[right.rows :] = 1  # and not read
        for given_N in (strided_N, strided_N.contiguous()):
            put_SK = put_pairs(given_N, layout)
            assert put_SK.dtype == dtype and put_SK.shape == (tokens, 3)
            kept = (right.row_SK >= 0).reshape(-1).tolist()
            assert exact(put_SK) == [value if here else 0 for value, here in zip(flat, kept, strict=True)]
    alike_N = torch.ones(1, device=device).to(dtype).expand(layout.rows)  # strided like gradients of sums
    assert exact(put_pairs(alike_N, layout)) == exact((layout.row_SK >= 0).float())


@pytest.mark.parametrize(
    ("dtype", "sizes", "programs"),
    [(torch.bfloat16, (), 1024), (torch.float64, (5, 3), 3), (torch.uint8, (1,), 1)],
    ids=str,
)
def test_zero_padding_clears_padding_rows_only(
    sizes: tuple[int, ...], programs: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if uses_triton(torch.empty(0, device=device)):
        monkeypatch.setattr("fusedmoe.kernels.triton.gather_sum._ZERO_PROGRAMS", programs)
    for empty in (0.0, 0.2, 1.0):
        layout = build_layout(choose(400, 2, 5, empty).to(device), 5)
        before = values((layout.rows, *sizes), dtype, device)
        expected = before.clone()
        expected[layout.kept :] = 0
        after = layout.zero_padding(before)
        assert after is before and torch.equal(after.view(torch.uint8), expected.view(torch.uint8))
