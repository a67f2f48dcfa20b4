"""Kernels: `X.py` is an operation in plain PyTorch, `triton/X.py` its Triton form, `gluon/X.py` its Hopper form.

`define_…` functions are the references that all forms must reproduce. Triton and Gluon forms are imported only on
devices that run them.
"""

from __future__ import annotations

from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout

__all__ = ["Layout", "Weights"]
