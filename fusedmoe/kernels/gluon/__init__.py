"""Hopper kernels in Gluon, Triton's language with explicit layouts, barriers, asynchronous copies and MMA.

`jit` decorates kernels; their device functions use `gluon.jit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from triton.experimental import gluon

from fusedmoe.kernels.triton.jit import Kernel


@gluon.jit
def _kernel() -> None:
    """Have the class of Gluon's kernels, which Gluon does not export."""


class GluonKernel(Kernel, type(_kernel)):  # type: ignore[misc]
    """Gluon kernel that launches on the device of its first tensor argument."""

    # No fences as in `fusedmoe.kernels.triton.jit`: these kernels issue them explicitly.


def jit(*, do_not_specialize: Sequence[str]) -> Any:
    return partial(GluonKernel, do_not_specialize=do_not_specialize)
