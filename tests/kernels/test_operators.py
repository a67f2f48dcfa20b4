"""Operators of `torch.ops.fusedmoe`: schema, fake tensors and gradients agree with their results."""

from __future__ import annotations

import pytest
import torch

from fusedmoe.autograd.order import order_operator
from tests.kernels.operator_cases import cases, check
from tests.kernels.routings import choose
from tests.marks import slowly

LONG = {"low_rank_experts", "clamped_swiglu", "grouped_linear"}


@pytest.mark.parametrize("name", [*sorted(cases(torch.device("cpu")).keys() - LONG), *slowly(*sorted(LONG))])
def test_operator_passes_opcheck(name: str) -> None:
    check(name, cases(torch.device("cpu"))[name])


def test_padded_layouts_have_valid_slack() -> None:
    expert_SK = choose(20, 3, 4, 0.3)
    for capacity in (None, 14):
        exact = order_operator(expert_SK, 4, capacity, None, False)
        padded = order_operator(expert_SK, 4, capacity, None, True)
        rows = len(exact[3])
        assert len(padded[3]) == (60 if capacity is None else 56) > rows
        for name, one, other in zip(("counts", "offsets", "source", "slot", "row"), exact, padded, strict=True):
            if name in ("source", "slot"):
                assert torch.equal(one, other[:rows]) and not other[rows:].any()
            else:
                assert torch.equal(one, other)


def test_data_dependent_sizes_are_symbolic() -> None:
    """Without padding the row count on a CPU is the number of kept rows; under tracing, it is a symbol."""
    expert_SK = choose(20, 3, 4, 0.3)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fusedmoe.order.default, (expert_SK, 4, None, None, False), test_utils=tests)
