"""A damaged file never yields wrong numbers, runs code, blocks a process, or leaves files behind."""

from __future__ import annotations

import random

import pytest

from tests.chaos.files import KEPT, campaign, one_bit


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_damaged_files_are_rejected_or_recovered(count: int) -> None:
    found = campaign(random.randrange(2**32), count)
    assert not found["failures"], found
    assert sum(found["outcomes"].values()) == count and found["outcomes"]["refused"] > count / 3


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_bit_flips_in_stored_files_are_detected(count: int) -> None:
    """Bit flips in checkpoints, memory states, notes, caches, costs and settings never yield wrong values."""
    found = campaign(seed := random.randrange(2**32), count, kinds=KEPT, harm=one_bit)
    assert not found["failures"], (seed, found)
    assert found["outcomes"].keys() <= {"refused", "right", "ignored with a warning"}
    assert found["by_kind"].keys() == set(KEPT) and found["outcomes"]["refused"] > count / 2
