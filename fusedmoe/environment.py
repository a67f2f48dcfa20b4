"""Numbers in environment variables, checked where they are read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import overload

from fusedmoe.errors import ConfigError


@overload
def integer(
    name: str, default: int, least: int | None = ..., most: int | None = ..., given: Mapping[str, str] | None = ...
) -> int: ...
@overload
def integer(
    name: str, default: None, least: int | None = ..., most: int | None = ..., given: Mapping[str, str] | None = ...
) -> int | None: ...
def integer(
    name: str,
    default: int | None,
    least: int | None = None,
    most: int | None = None,
    given: Mapping[str, str] | None = None,
) -> int | None:
    """Return the integer in a variable, or `default` where the variable is not set or empty.

    Args:
        least, most: bounds of the value.
        given: the environment; None: that of the process.
    Raises:
        ConfigError: the value is no integer, or is out of bounds.
    """
    text = (os.environ if given is None else given).get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or (least is not None and value < least) or (most is not None and value > most):
        raise ConfigError(f"{name}={text!r} in the environment must be an integer{_bounds(least, most)}")
    return value


def seconds(name: str, default: float) -> float:
    """Return the seconds in a variable, or `default` where the variable is not set or empty.

    Raises:
        ConfigError: the value is no number, or not positive and finite.
    """
    value = number(name, default)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={os.environ[name]!r} in the environment must be seconds above 0, and finite")
    return value


def number(name: str, default: float) -> float:
    """Return the number in a variable, or `default` where the variable is not set or empty.

    Raises:
        ConfigError: the value is no number, or NaN.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{name}={text!r} in the environment must be a number")
    return value


def _bounds(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of at least {least}" if least is not None else "" if most is None else f" of at most {most}"
