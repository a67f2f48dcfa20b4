"""A plugin of pytest: models of transformers have this library's experts, unless a test chooses others by name."""

from __future__ import annotations

from functools import wraps
from typing import Any


def pytest_configure(config: Any) -> None:
    from transformers import PreTrainedModel

    import fusedmoe.hf

    original = PreTrainedModel.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # What the model was given by name stays.
        if getattr(self.config, "_experts_implementation", None) in (None, "grouped_mm"):
            self.set_experts_implementation(fusedmoe.hf.NAME)

    PreTrainedModel.__init__ = __init__
