"""Marks for parameters of tests that select when they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

#: For cases that take a moment on a GPU and seconds in Triton's interpreter.
slow_without_gpu: Any = () if torch.cuda.is_available() else pytest.mark.slow


def slowly(*cases: Any, mark: Any = pytest.mark.slow) -> list[Any]:
    """Cases of a parametrised test that run only with `-m slow`: `[quick, *slowly(one, other)]`; a tuple is a case."""
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=mark) for case in cases]


def interpreted_slowly(*cases: Any) -> list[Any]:
    """Cases that run by default on a GPU; in Triton's interpreter only with `-m slow`."""
    return slowly(*cases, mark=slow_without_gpu)
