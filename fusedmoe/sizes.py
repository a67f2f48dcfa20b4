"""Bounds of sizes: absurd ones are refused where a part is constructed, and not by an allocation later."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusedmoe.errors import ConfigError

#: The largest number of experts, K, model or hidden dimension, and capacity factor (E/K drops nothing already).
MOST = 2**24
#: The largest number of elements of one parameter on a rank.
MOST_ELEMENTS = 2**40


def above_bound(value: float) -> bool:
    """Return whether a size is not finite, or above `MOST`."""
    return not abs(value) <= MOST


def require_within(who: str, **sizes: float | None) -> None:
    """Refuse sizes above `MOST`.

    Raises:
        ConfigError: a size is above the bound, or not finite; the error names it.
    """
    for name, value in sizes.items():
        if value is not None and above_bound(value):
            raise ConfigError(f"{who}: {name} = {value} is out of bounds; the largest is {MOST}")


def require_room(who: str, name: str, shape: Sequence[int]) -> None:
    """Refuse a parameter of more than `MOST_ELEMENTS` elements.

    Raises:
        ConfigError: the parameter would have more.
    """
    if math.prod(shape) > MOST_ELEMENTS:
        raise ConfigError(
            f"{who}: {name} of shape {list(shape)} would have {math.prod(shape)} elements on this rank; the bound is "
            f"{MOST_ELEMENTS}. Choose fewer experts or smaller dimensions, or split them over more ranks"
        )
