"""gpt-oss's activation in plain torch."""

from __future__ import annotations

import pytest
import torch

from fusedmoe.autograd.grouped import clamped_swiglu
from fusedmoe.errors import ConfigError
from tests.kernels.clamped_swiglu_cases import ALPHA, DTYPES, SHAPES, check_bounds, check_shape, check_strides

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_clamped_swiglu_equals_definition_with_gradients(rows: int, width: int, dtype: torch.dtype) -> None:
    check_shape(rows, width, dtype, CPU)


def test_clamped_swiglu_at_and_beyond_limit() -> None:
    check_bounds(CPU)


def test_clamped_swiglu_of_strided_rows() -> None:
    check_strides(CPU)


def test_clamped_swiglu_rejects_wrong_shape_dtype_or_limit() -> None:
    rows = torch.randn(3, 8)
    for given, limit in ((rows[:, :7], 1.0), (rows[0], 1.0), (rows.long(), 1.0), (rows, 0.0), (rows, float("nan"))):
        with pytest.raises(ConfigError, match="clamped_swiglu"):
            clamped_swiglu(given, ALPHA, limit)
