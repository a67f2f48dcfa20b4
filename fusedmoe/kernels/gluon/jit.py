"""`jit`, which makes the kernels that are launched; the functions that they are made of are `gluon.jit`'s.

As of Triton's kernels, a launch goes to the GPU that its tensors are on. Fences these kernels have of their own, under
every Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from fusedmoe.kernels.triton.jit import Kernel


class GluonKernel(Kernel, GluonJITFunction):
    """Compiles as Gluon, and launches where its first tensor is."""


def jit(*, do_not_specialize: Sequence[str]) -> Any:
    """A decorator."""
    return partial(GluonKernel, do_not_specialize=do_not_specialize)
