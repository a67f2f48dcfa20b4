"""Random delays inside interpreted kernels: ranks then interleave in ways that an idle machine does not produce."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Programs begin, store, and signal or wait with atomics: a peer may write between any two of these operations.
_OPERATIONS = ("set_grid_idx", "create_atomic_rmw", "create_atomic_cas", "create_store", "create_masked_store")


@contextmanager
def delayed(rank: int, seed: int) -> Iterator[None]:
    """Delay kernels of this rank at random: many short delays, or few long ones.

    Args:
        seed: equal on all ranks; each rank draws different delays.
    """
    from triton.runtime.interpreter import interpreter_builder

    probability, most_s = random.Random(seed).choice([(0.1, 0.005), (0.02, 0.02), (0.005, 0.2)])
    draw = random.Random(f"{seed}/{rank}")
    most_s *= draw.choice([0.2, 1.0, 3.0])

    def after_a_delay(operation: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if draw.random() < probability:
                time.sleep(draw.random() * most_s)
            return operation(*args, **keywords)

        return call

    builder = type(interpreter_builder)
    with pytest.MonkeyPatch.context() as patch:
        for name in _OPERATIONS:
            patch.setattr(builder, name, after_a_delay(getattr(builder, name)))
        yield
