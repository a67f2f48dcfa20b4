"""Grouped GEMMs over rows sorted by expert: references, and two GEMMs as stand-alone operations. Not differentiable.

Row n belongs to expert `expert_N[n]` and copies token `source_N[n]`. The four GEMMs of `experts`:

* `up`: h = x[source]·W1_eᵀ + b1_e and a = act(h);
* `product`: a[n]·B_e (+ bias), for the down projection and for the input gradient of the up projection;
* `dhidden`: dA' = dy[source]·W2_e, with all its consumers as epilogue;
* `dweight`: Σ over the rows n of an expert of left[n]ᵀ·right[n], the weight gradient.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from fusedmoe.kernels.activation import define_activation
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.layout import Layout


def grouped_product(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, layout: Layout, transposed: bool
) -> Tensor:
    """Compute [N, O]: each row times its expert's matrix, plus its bias; zeros in padding rows.

    `weight` is [E, O, K] if transposed, else [E, K, O]; the kernels copy it if it is not contiguous.
    """
    if has_kernels(rows_NK):
        from fusedmoe.kernels.triton import experts

        return experts.grouped_product(rows_NK, weight, bias_EO, layout, transposed)
    out = layout.zero_padding(rows_NK.new_empty((layout.rows, weight.shape[1 if transposed else 2])))
    for e, start, stop in _of_experts(layout):
        matrix = weight[e].t() if transposed else weight[e]
        torch.mm(rows_NK[start:stop], matrix, out=out[start:stop])
        if bias_EO is not None:
            out[start:stop] += bias_EO[e]
    return out


def grouped_dweight(left_NP: Tensor, right_NQ: Tensor, layout: Layout) -> Tensor:
    """Compute [E, P, Q]: Σ over each expert's rows of left[n]ᵀ·right[n]; zeros without rows. Never reads padding."""
    if has_kernels(left_NP):
        from fusedmoe.kernels.triton import experts

        return experts.grouped_dweight(left_NP, right_NQ, layout)
    out = left_NP.new_empty((layout.experts, left_NP.shape[1], right_NQ.shape[1]))
    for e, count in enumerate(layout.counts):
        if count == 0:
            # `out` is uninitialized.
            out[e].zero_()
    for e, start, stop in _of_experts(layout):
        torch.mm(left_NP[start:stop].t(), right_NQ[start:stop], out=out[e])
    return out


def _of_experts(layout: Layout) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end) of experts with rows. Synchronizes with the device."""
    ends = list(accumulate(layout.counts))
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(layout.counts, ends, strict=True)) if count]


def define_up(
    x_SM: Tensor, source_N: Tensor, expert_N: Tensor, w1: Tensor, b1: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    h = torch.empty((len(source_N), *w1.shape[1:-1]), dtype=x_SM.dtype, device=x_SM.device)
    for e, matrix in enumerate(w1):
        h[expert_N == e] = torch.einsum("nm,...m->n...", x_SM[source_N[expert_N == e]], matrix)
    if b1 is not None:
        h = h + b1[expert_N]
    return h, define_activation(activation, h)


def define_product(a_NK: Tensor, expert_N: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """Return the product with `b`: [E, N, K] if transposed, else [E, K, N]."""
    out = torch.empty((len(a_NK), b.shape[1] if transposed else b.shape[2]), dtype=a_NK.dtype, device=a_NK.device)
    for e, matrix in enumerate(b):
        out[expert_N == e] = a_NK[expert_N == e] @ (matrix.t() if transposed else matrix)
    return out


def define_dhidden(
    dy_SM: Tensor, source_N: Tensor, expert_N: Tensor, weight_N: Tensor, h: Tensor, w2: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    h = h.detach().requires_grad_()
    with torch.enable_grad():
        a = define_activation(activation, h)
    da = define_product(dy_SM[source_N], expert_N, w2, False)
    (dh,) = torch.autograd.grad(a, h, da * weight_N[:, None])
    return dh, a.detach() * weight_N[:, None], (da * a.detach()).sum(-1)


def define_dweight(left_NP: Tensor, right_NQ: Tensor, expert_N: Tensor, experts: int) -> Tensor:
    rows = [expert_N == e for e in range(experts)]
    return torch.stack([left_NP[of_expert].t() @ right_NQ[of_expert] for of_expert in rows])


_Sum = TypeVar("_Sum", Tensor, Tensor | None)


def at_least_float32(total: _Sum) -> _Sum:
    """Return an accumulator for weight gradients: float32 in place of half precision, to round the sum once."""
    return total.float() if total is not None and total.dtype.itemsize < 4 else total
