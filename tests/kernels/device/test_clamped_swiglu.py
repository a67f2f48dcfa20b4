"""gpt-oss's activation in kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.clamped_swiglu_cases import DTYPES, SHAPES, check_bounds, check_shape, check_strides


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_clamped_swiglu_equals_definition_with_gradients(
    device: torch.device, rows: int, width: int, dtype: torch.dtype
) -> None:
    check_shape(rows, width, dtype, device)


def test_clamped_swiglu_at_and_beyond_limit(device: torch.device) -> None:
    check_bounds(device)


def test_clamped_swiglu_of_strided_rows(device: torch.device) -> None:
    check_strides(device)
