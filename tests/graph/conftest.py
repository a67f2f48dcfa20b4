from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Nothing of another test is left in the compiler, nor anything there for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
