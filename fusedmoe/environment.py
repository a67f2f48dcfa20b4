"""Validated numbers from environment variables, and a warning for one that limits overlap."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TypeVar

from fusedmoe.errors import ConfigError

# `int`, or None if a variable may be unset.
Default = TypeVar("Default", int, None)


def read_integer(
    name: str,
    default: Default,
    least: int | None = None,
    most: int | None = None,
    given: Mapping[str, str] | None = None,
) -> int | Default:
    """Return the integer in a variable, or `default` if it is unset or empty.

    `given`: the environment; None: the environment of the process. Raises `ConfigError` if the value is not an integer
    from `least` to `most`.
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


def launch_command(ranks: int, arguments: str) -> str:
    """Return the shell command that runs `fusedmoe` on `ranks` ranks, with as many ranks per host as this job has."""
    if ranks == 1:
        return f"fusedmoe {arguments}"
    local = min(ranks, read_integer("LOCAL_WORLD_SIZE", ranks, 1))
    hosts = "--standalone" if local == ranks else f"--nnodes {ranks // local} --rdzv-endpoint HOST:PORT"
    return f"torchrun --nproc-per-node {local} {hosts} -m fusedmoe {arguments}"


def read_seconds(name: str, default: float) -> float:
    """Return the seconds in a variable, or `default` if unset. Raises `ConfigError` if not positive and finite."""
    value = read_number(name, default)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={os.environ[name]!r} in the environment must be positive, finite seconds")
    return value


def read_number(name: str, default: float) -> float:
    """Return the number in a variable, or `default` if unset or empty. Raises `ConfigError` if invalid."""
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{name}={text!r} in the environment must be a number")
    return value


def single_queue_warning() -> str:
    """Return why the value of CUDA_DEVICE_MAX_CONNECTIONS limits overlap, with the fix, or "" if it does not."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() != "1":
        return ""
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue holds the launches of all streams of a process, and "
        "communication may not overlap with computation as scheduled; unset it, or with Megatron's tensor or context "
        "parallelism before Blackwell, which require it, measure both values (docs/guides/performance.md)"
    )


def _bounds(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of at least {least}" if least is not None else "" if most is None else f" of at most {most}"
