"""Every public operation and the layer, on random valid edge-case input in poisoned memory: right to 1e-10."""

from __future__ import annotations

import random

import pytest

from tests.poison import poisoned
from tests.properties.draw import Draw
from tests.properties.valid import PROPERTIES


def check_property(name: str, first: int, cases: int) -> None:
    with poisoned():
        for seed in range(first, first + cases):
            try:
                PROPERTIES[name](Draw(seed))
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {error!r}") from error


@pytest.mark.parametrize("name", PROPERTIES)
def test_operation_equals_definition(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    check_property(name, first, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_operation_equals_definition_many_seeds(name: str) -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds from {first}")
    check_property(name, first, 100)
