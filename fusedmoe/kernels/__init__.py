"""Kernels: `X.py` holds the contract of an operation and its definition in plain PyTorch, which also runs on CPUs.

`triton/X.py` is the Triton form, imported only on devices that run it (a folder `triton/X/` if it has several kernels);
`gluon/X.py` is the form for Hopper, where one exists.
"""

from __future__ import annotations

from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout, contiguous_layout
from fusedmoe.kernels.low_rank import Adapters, LowRank, Matrices, StoredWeights

__all__ = [
    "Adapters",
    "Function",
    "Layout",
    "LowRank",
    "Matrices",
    "StoredWeights",
    "Weights",
    "contiguous_layout",
]
