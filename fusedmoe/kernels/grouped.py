"""Products over rows sorted by expert: definitions in plain torch, and two that are operations of their own.

Rows n = 0 … N - 1 belong to experts, `expert_N`; `source_N` says which token each of them copies. There are four:

* `up`: h = x[source]·W1_eᵀ + b1_e and a = act(h), rows gathered on the way in, the activation on the way out;
* `product`: a[n]·B_e (+ bias), the down projection, and the gradient of the rows that go into the up projection;
* `dhidden`: from dA' = dy[source]·W2_e, while it is in registers, everything that needs it;
* `dweight`: Σ over the rows n of an expert of left[n]ᵀ·right[n], the gradient of the experts' matrices.

`grouped_product` and `grouped_dweight` serve networks that `experts` does not know. Contract: tensors in, tensors out;
no autograd.

Their Triton cuts the rows into tiles (`tiles.py`), so that the size of a grid is known without asking the device.
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
    """[N, O]: each row times its expert's matrix, plus its bias; zeros in padding rows.

    `weight`: [E, O, K] if transposed, else [E, K, O]; any strides, but the kernels read a contiguous copy of others.
    """
    if has_kernels(rows_NK):
        from fusedmoe.kernels.triton import experts

        return experts.grouped_product(rows_NK, weight, bias_EO, layout, transposed)
    out = layout.zero_padding(rows_NK.new_empty((layout.rows, weight.shape[1 if transposed else 2])))
    for e, start, stop in _of_experts(layout):
        matrix = weight[e].t() if transposed else weight[e]
        # Straight to its place in the result: nothing is concatenated.
        torch.mm(rows_NK[start:stop], matrix, out=out[start:stop])
        if bias_EO is not None:
            out[start:stop] += bias_EO[e]
    return out


def grouped_dweight(left_NP: Tensor, right_NQ: Tensor, layout: Layout) -> Tensor:
    """[E, P, Q]: Σ over each expert's rows of left[n]ᵀ·right[n]; zeros where it has none. Padding is not read."""
    if has_kernels(left_NP):
        from fusedmoe.kernels.triton import experts

        return experts.grouped_dweight(left_NP, right_NQ, layout)
    out = left_NP.new_empty((layout.experts, left_NP.shape[1], right_NQ.shape[1]))
    for e, count in enumerate(layout.counts):
        if count == 0:
            # `out` is new memory: an expert without rows has a gradient of zeros, not what was there.
            out[e].zero_()
    for e, start, stop in _of_experts(layout):
        torch.mm(left_NP[start:stop].t(), right_NQ[start:stop], out=out[e])
    return out


def _of_experts(layout: Layout) -> list[tuple[int, int, int]]:
    """Experts that have rows: number, first row, end (on CUDA this waits for the device once)."""
    ends = list(accumulate(layout.counts))
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(layout.counts, ends, strict=True)) if count]


def define_up(
    x_SM: Tensor, source_N: Tensor, expert_N: Tensor, w1: Tensor, b1: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """h and a, in plain torch."""
    h = torch.empty((len(source_N), *w1.shape[1:-1]), dtype=x_SM.dtype, device=x_SM.device)
    for e, matrix in enumerate(w1):
        h[expert_N == e] = torch.einsum("nm,...m->n...", x_SM[source_N[expert_N == e]], matrix)
    if b1 is not None:
        h = h + b1[expert_N]
    return h, define_activation(activation, h)


def define_product(a_NK: Tensor, expert_N: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """out, in plain torch; `b` is [E, N, K] if transposed, else [E, K, N]."""
    out = torch.empty((len(a_NK), b.shape[1] if transposed else b.shape[2]), dtype=a_NK.dtype, device=a_NK.device)
    for e, matrix in enumerate(b):
        out[expert_N == e] = a_NK[expert_N == e] @ (matrix.t() if transposed else matrix)
    return out


def define_dhidden(
    dy_SM: Tensor, source_N: Tensor, expert_N: Tensor, weight_N: Tensor, h: Tensor, w2: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dH, s·A and the router weights' gradient, in plain torch."""
    h = h.detach().requires_grad_()
    with torch.enable_grad():
        a = define_activation(activation, h)
    da = define_product(dy_SM[source_N], expert_N, w2, False)
    (dh,) = torch.autograd.grad(a, h, da * weight_N[:, None])
    return dh, a.detach() * weight_N[:, None], (da * a.detach()).sum(-1)


def define_dweight(left_NP: Tensor, right_NQ: Tensor, expert_N: Tensor, experts: int) -> Tensor:
    """out [E, P, Q], in plain torch, of rows already gathered."""
    rows = [expert_N == e for e in range(experts)]
    return torch.stack([left_NP[of_expert].t() @ right_NQ[of_expert] for of_expert in rows])


_Sum = TypeVar("_Sum", Tensor, Tensor | None)


def at_least_float32(total: _Sum) -> _Sum:
    """Returns a sum that further rows' gradients are added to: as it is, or of half precision a copy in float32."""
    # Chunks are not rounded one after the other: half precision is for their sum.
    return total.float() if total is not None and total.dtype.itemsize < 4 else total
