"""Pytest plugin that gives transformers models this library's experts unless a test selects others by name."""

from __future__ import annotations

from functools import wraps
from typing import Any


def pytest_configure(config: Any) -> None:
    from transformers import PreTrainedModel

    import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers

    original = PreTrainedModel.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Keep implementations selected by name.
        if getattr(self.config, "_experts_implementation", None) in (None, "grouped_mm"):
            self.set_experts_implementation("fusedmoe")

    PreTrainedModel.__init__ = __init__
