from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from fusedmoe.autograd.order import order
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gather_sum import gather_sum, permute, put_pairs, take_pairs
from fusedmoe.kernels.layout import Layout, build_layout, define_layout, row_bound
from fusedmoe.kernels.triton import layout as kernels
from tests.kernels.routings import choose
from tests.marks import interpreted_slowly


def compare(expert_SK: Tensor, experts: int, capacity: int | None = None, priority_S: Tensor | None = None) -> Layout:
    """Compare and validate the layout, rows and slack."""
    got = build_layout(expert_SK, experts, capacity, priority_S)
    expected = define_layout(expert_SK, experts, capacity, priority_S)
    for name in ("counts_E", "offsets_E1", "row_SK"):
        value, right = getattr(got, name).cpu(), getattr(expected, name)
        assert value.dtype == right.dtype and torch.equal(value, right), name
    assert got.rows == row_bound(*expert_SK.shape, experts, capacity)
    assert got.source_N is not None and expected.source_N is not None
    assert torch.equal(got.source_N[: expected.rows].cpu(), expected.source_N)
    assert torch.equal(got.pair_N[: expected.rows].cpu(), expected.pair_N)
    assert not got.source_N[expected.rows :].any() and not got.pair_N[expected.rows :].any()
    return got


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "empty", "capacity", "ranked"),
    [
        (0, 2, 7, 0.0, None, False),
        (0, 2, 7, 0.0, 3, True),
        (1, 1, 1, 0.0, None, False),
        (1, 8, 64, 0.0, 1, False),
        (37, 3, 7, 0.0, None, False),
        (37, 3, 7, 0.3, 9, True),
        (37, 10, 512, 0.2, 1, True),
        (37, 16, 128, 0.0, None, True),
        (37, 2, 7, 0.0, 0, False),
        (37, 2, 7, 1.0, 5, False),
        (257, 1, 1, 0.0, 100, True),
        (300, 16, 8, 0.0, None, False),
        *interpreted_slowly(
            (1000, 2, 64, 0.0, 40, False), (1000, 8, 128, 0.0, None, False), (1000, 10, 512, 0.1, 20, True)
        ),
    ],
)
def test_sorted_layout_equals_definition(
    tokens: int, slots: int, experts: int, empty: float, capacity: int | None, ranked: bool, device: torch.device
) -> None:
    expert_SK = choose(tokens, slots, experts, empty).to(device)
    # Few distinct priorities, to produce ties.
    priority_S = torch.randint(0, 5, (tokens,), device=device).float() if ranked else None
    compare(expert_SK, experts, capacity, priority_S)


def test_layout_of_empty_experts_and_single_expert(device: torch.device) -> None:
    compare((choose(100, 2, 4) * 5 + 40).to(device), 128)
    compare((choose(100, 2, 4) * 5 + 40).to(device), 128, 30)
    for expert in (0, 5, 6):
        compare(torch.full((600, 1), expert, device=device), 7)
        compare(torch.full((600, 1), expert, device=device), 7, 300)


@pytest.mark.parametrize("alone", [0, 4096])
@pytest.mark.parametrize("blocks", [1, 3, *interpreted_slowly(12)])
def test_layout_of_few_blocks_with_many_steps(
    blocks: int, alone: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve steps; counts from the block itself and from an earlier launch, read a few at a time."""
    monkeypatch.setattr(kernels, "BLOCKS", blocks)
    monkeypatch.setattr(kernels, "ALONE", alone)
    monkeypatch.setattr(kernels, "WIDE", 256)
    monkeypatch.setattr(kernels, "TABLE", 64)
    compare(choose(751, 2, 20, 0.1).to(device), 20, 60)
    compare(choose(751, 2, 20, 0.1).to(device), 20, None, torch.randint(0, 5, (751,), device=device).float())


def test_layout_of_strided_and_int32_experts_equals_definition(device: torch.device) -> None:
    compare(choose(3, 50, 50).to(device).t()[:, 1:], 50)
    compare(choose(90, 4, 9).to(device)[::2, ::2], 9, 8)
    compare(choose(37, 2, 9, 0.2).int().to(device), 9)


def test_out_of_range_experts_are_treated_as_empty_slots(device: torch.device) -> None:
    expert_SK = choose(37, 2, 9)
    wild = torch.where(expert_SK < 4, expert_SK, torch.tensor([9, -7, 2**40, 2**32])[torch.randint(4, (37, 2))])
    got = build_layout(wild.to(device), 9)
    assert torch.equal(got.row_SK.cpu(), define_layout(torch.where(expert_SK < 4, expert_SK, -1), 9).row_SK)


@pytest.mark.parametrize("alone", [0, 4096])
@pytest.mark.parametrize("place", [0, 300])
@pytest.mark.parametrize("number", [-2, 9, 2**40])
def test_order_asserts_expert_range(
    number: int, place: int, alone: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("it would end this process's work on the GPU")
    monkeypatch.setattr(kernels, "ALONE", alone)
    expert_SK = choose(200, 2, 9, 0.2)
    order(expert_SK, 9)
    expert_SK.view(-1)[place] = number
    with pytest.raises((RuntimeError, ConfigError), match="order: chosen experts must be numbers from 0 to 8"):
        order(expert_SK, 9)


def test_row_count_beyond_int32_raises() -> None:
    with pytest.raises(ValueError, match="split the batch"):
        kernels.sort_pairs(torch.empty(1, 1, dtype=torch.long).expand(2**30, 2), 8, None, None)


@pytest.mark.parametrize(("tokens", "capacity"), [(0, 3), (50, None), (50, 7)])
def test_layout_never_synchronizes(
    tokens: int, capacity: int | None, no_sync: Callable[[], AbstractContextManager[None]], device: torch.device
) -> None:
    expert_SK, priority_S = choose(tokens, 2, 9, 0.2).to(device), torch.rand(tokens, device=device)
    value_SK, x_SM = torch.rand(tokens, 2, device=device), torch.rand(tokens, 20, device=device)
    for _ in range(2):  # the first pass compiles
        with no_sync():
            layout = build_layout(expert_SK, 9, capacity, priority_S)
            gather_sum(permute(x_SM, layout), layout, take_pairs(value_SK, layout))
            put_pairs(take_pairs(value_SK, layout), layout)
    with pytest.raises(RuntimeError), no_sync():
        layout.counts  # noqa: B018
    with pytest.raises(RuntimeError), no_sync():
        layout.offsets_E1[-1].item()


def test_order_operator_without_tokens(device: torch.device) -> None:
    layout = order(torch.empty((0, 2), dtype=torch.long, device=device), 4)
    assert layout.counts == [0] * 4 and layout.rows == 0 and layout.row_SK.shape == (0, 2)
