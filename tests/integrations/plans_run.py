"""Record of the runs that used a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from fusedmoe.engine.run import Plans, Run
from fusedmoe.engine.shared_expert_task import SharedExpertTask


@contextmanager
def plans_run() -> Iterator[list[tuple[int, int]]]:
    """Collect the chunk counts, forward and backward, of the planned runs inside the context."""
    ran: list[tuple[int, int]] = []

    def made(plans: Plans, *rest: Any) -> Run:
        ran.append(plans.degrees)
        return Run(plans, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.engine.run.Run", made)
        yield ran


@contextmanager
def tasks_run() -> Iterator[list[str]]:
    """Context that collects the passes in which plans compute a shared expert."""
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            original = getattr(SharedExpertTask, name)

            def body(self: Any, *args: Any, name: str = name, original: Any = original) -> None:
                ran.append(name)
                original(self, *args)

            patch.setattr(SharedExpertTask, name, body)
        yield ran


def forwards_of(module: nn.Module) -> list[nn.Module]:
    """Return a list that gains an entry for each later forward."""
    ran: list[nn.Module] = []
    module.register_forward_hook(lambda module, *_: ran.append(module))
    return ran
