"""Every public operation and the layer, on random input with one corrupted argument: refused by name."""

from __future__ import annotations

import random

import pytest

from tests.properties.draw import Draw
from tests.properties.invalid import CASES, attempt


def assert_rejected(name: str, first: int, cases: int) -> None:
    for seed in range(first, first + cases):
        try:
            attempt(CASES[name], Draw(seed))
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error


@pytest.mark.parametrize("name", CASES)
def test_corrupted_argument_raises_config_error(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    assert_rejected(name, first, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_corrupted_argument_raises_config_error_many_seeds(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    assert_rejected(name, first, 200)
