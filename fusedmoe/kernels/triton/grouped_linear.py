"""The two grouped products by themselves; their contract is in `fusedmoe.kernels.grouped_linear`."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.triton.experts import make_call
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.product import product


def grouped_product(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, layout: Layout, transposed: bool
) -> Tensor:
    bias = None if bias_EO is None else bias_EO.contiguous()
    operation = "down" if transposed else "dinput"
    out = product(make_call(layout, rows_NK), operation, rows_NK, weight.contiguous(), transposed, bias)
    return layout.zero_padding(out)


def grouped_dweight(left_NP: Tensor, right_NQ: Tensor, layout: Layout) -> Tensor:
    return dweight(make_call(layout, left_NP), "dw1", left_NP, right_NQ, None)
