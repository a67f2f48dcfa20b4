"""Every public operation and the layer, on random input with one thing spoilt: refused, and by name."""

from __future__ import annotations

import random

import pytest

from tests.properties.draw import Draw
from tests.properties.invalid import CASES, attempt


def refuse(name: str, first: int, cases: int) -> None:
    for seed in range(first, first + cases):
        try:
            attempt(CASES[name], Draw(seed))
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error


@pytest.mark.parametrize("name", CASES)
def test_a_few(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    refuse(name, first, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    refuse(name, first, 200)
