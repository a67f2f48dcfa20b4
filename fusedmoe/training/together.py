"""Local work whose failure on one rank must end it on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError

T = TypeVar("T")


def together(topology: Topology, operation: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns all results, in rank order. Collective over all ranks.

    Nobody goes on before everybody has succeeded.

    Raises:
        ConfigError: every rank's action raised one; each rank raises its own.
        RankError: the action failed on some rank; the message, which names it, is the same everywhere.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # told to the others, and raised below
        failure = error
    refused = isinstance(failure, ConfigError)
    message = None if failure is None else (str(failure) if refused else f"{type(failure).__name__}: {failure}")
    outcomes = all_gather_object(topology.world, (message, refused, result), operation)
    failures = [(rank, text, its_own) for rank, (text, its_own, _) in enumerate(outcomes) if text is not None]
    if not failures:
        return [value for _, _, value in outcomes]
    if len(failures) == len(outcomes) and all(its_own for _, _, its_own in failures):
        assert failure is not None
        raise failure
    ranks = [rank for rank, _, _ in failures]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    raise RankError(f"{operation} failed on {where}: {failures[0][1]}") from failure
