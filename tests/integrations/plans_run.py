"""Which runs by a plan there were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fusedmoe.engine.run import Plans, Run


@contextmanager
def plans_run() -> Iterator[list[tuple[int, int]]]:
    """The numbers of chunks, forward and backward, of the runs by a plan inside the context."""
    ran: list[tuple[int, int]] = []

    def made(plans: Plans, *rest: Any) -> Run:
        ran.append(plans.degrees)
        return Run(plans, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.engine.collectives_dispatcher.Run", made)
        yield ran
