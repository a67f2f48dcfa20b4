"""Upper bounds of sizes, checked at construction rather than by a failed allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusedmoe.errors import ConfigError

#: Maximum number of experts, K, model or hidden dimension, and capacity factor (E/K already drops nothing).
MAX_SIZE = 2**24
#: Maximum number of elements of one parameter on a rank.
MAX_ELEMENTS = 2**40


def require_within(who: str, **sizes: float | None) -> None:
    for name, value in sizes.items():
        if value is not None and not abs(value) <= MAX_SIZE:
            raise ConfigError(f"{who}: {name} = {value} is out of bounds; the largest is {MAX_SIZE}")


def require_elements(who: str, name: str, shape: Sequence[int]) -> None:
    if math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(
            f"{who}: {name} of shape {list(shape)} would have {math.prod(shape)} elements on this rank; the bound is "
            f"{MAX_ELEMENTS}. Choose fewer experts or smaller dimensions, or split them over more ranks"
        )
