"""Which runs by a plan there were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

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


def forwards_of(module: nn.Module) -> list[nn.Module]:
    """A list with a place for each forward from now on."""
    ran: list[nn.Module] = []
    module.register_forward_hook(lambda module, *_: ran.append(module))
    return ran
