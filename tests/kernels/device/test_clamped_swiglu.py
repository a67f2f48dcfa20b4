"""gpt-oss's activation by kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.clamped_swiglu_cases import DTYPES, SHAPES, check_bounds, check_shape, check_strides


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_values_and_gradients(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    check_shape(rows, width, dtype, device)


def test_on_the_bounds_and_beyond(device: torch.device) -> None:
    check_bounds(device)


def test_strides(device: torch.device) -> None:
    check_strides(device)
