"""A linear map of each expert's rows, and the gradient of its matrices, for networks that `experts` does not know.

Contract: tensors in, tensors out; no autograd. Definitions: `define_product` and `define_dweight` in
`fusedmoe.kernels.grouped`.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.layout import Layout


def grouped_product(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, layout: Layout, transposed: bool
) -> Tensor:
    """[N, O]: each row times its expert's matrix, plus its bias; zeros in padding rows.

    `weight`: [E, O, K] if transposed, else [E, K, O]; any strides, but the kernels read a contiguous copy of others.
    """
    if has_kernels(rows_NK):
        from fusedmoe.kernels.triton import grouped_linear as kernels

        return kernels.grouped_product(rows_NK, weight, bias_EO, layout, transposed)
    out = layout.zero_padding(rows_NK.new_empty((layout.rows, weight.shape[1 if transposed else 2])))
    for e, start, stop in _of_experts(layout):
        matrix = weight[e].t() if transposed else weight[e]
        torch.mm(rows_NK[start:stop], matrix, out=out[start:stop])
        if bias_EO is not None:
            out[start:stop] += bias_EO[e]
    return out


def grouped_dweight(left_NP: Tensor, right_NQ: Tensor, layout: Layout) -> Tensor:
    """[E, P, Q]: Σ over each expert's rows of left[n]ᵀ·right[n]; zeros where it has none. Padding is not read."""
    if has_kernels(left_NP):
        from fusedmoe.kernels.triton import grouped_linear as kernels

        return kernels.grouped_dweight(left_NP, right_NQ, layout)
    out = left_NP.new_empty((layout.experts, left_NP.shape[1], right_NQ.shape[1]))
    for e, count in enumerate(layout.counts):
        if count == 0:
            out[e].zero_()
    for e, start, stop in _of_experts(layout):
        torch.mm(left_NP[start:stop].t(), right_NQ[start:stop], out=out[e])
    return out


def _of_experts(layout: Layout) -> list[tuple[int, int, int]]:
    """Experts that have rows: number, first row, end (on CUDA this waits for the device once)."""
    ends = list(accumulate(layout.counts))
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(layout.counts, ends, strict=True)) if count]
