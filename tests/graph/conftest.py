from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Reset the compiler before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
