"""No damaged file gives wrong numbers, runs anything, is waited for, or leaves anything behind."""

from __future__ import annotations

import random

import pytest

from tests.chaos.files import campaign


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_damaged_files(count: int) -> None:
    found = campaign(random.randrange(2**32), count)
    assert not found["failures"], found
    assert sum(found["outcomes"].values()) == count and found["outcomes"]["refused"] > count / 3
