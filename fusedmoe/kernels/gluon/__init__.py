"""Kernels for Hopper in Gluon, Triton's language of explicit layouts, barriers and asynchronous copies and products.

Nothing imports this but what launches, compiles or tests such kernels. `jit` makes those that are launched; the
functions that they are made of are `gluon.jit`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fusedmoe.compat.triton import GluonJITFunction
from fusedmoe.kernels.triton.jit import Kernel


class GluonKernel(Kernel, GluonJITFunction):
    """Compiles as Gluon, and launches where its first tensor is."""

    # No fences as `fusedmoe.kernels.triton.jit` adds: these kernels have their own, under every Triton.


def jit(*, do_not_specialize: Sequence[str]) -> Any:
    """A decorator."""
    return partial(GluonKernel, do_not_specialize=do_not_specialize)
