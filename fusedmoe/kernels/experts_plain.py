"""The experts' operation in plain torch: any device and dtype; what serves CPU tensors.

The rows of an expert are worked through in blocks, so that activations are applied while a block is in the cache and no
tensor of the size of H besides H itself is ever made. On CUDA it waits for the device once, to learn the counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Gradients, Weights

# Rows of a block: large enough for full speed in the matrix products, small enough for its activations to stay cached.
_BLOCK_ROWS = 512


def experts_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """y_SM and h_NH, as `fusedmoe.kernels.experts.experts_forward`."""
    x_SM = x_SM.contiguous()
    hidden, dim = weights.w2.shape[2], weights.w2.shape[1]
    h_NH = x_SM.new_empty((layout.rows, activation.halves * hidden))
    out_NM = x_SM.new_empty((layout.rows, dim))
    scratch = _Scratch(x_SM, layout)
    a = scratch.take(hidden)
    for expert, start, stop in scratch.blocks(layout):
        rows = stop - start
        h = h_NH[start:stop]
        torch.mm(scratch.gather(x_SM, layout, start, stop), weights.up(expert).t(), out=h)
        if weights.b1 is not None:
            h.add_(weights.b1[expert].view(-1))
        _activate(h, a[:rows], activation)
        torch.mm(a[:rows], weights.w2[expert].t(), out=out_NM[start:stop])
        if weights.b2 is not None:
            out_NM[start:stop, weights.b2_columns()] += weights.b2[expert]
    y_SM = gather_sum(out_NM, layout, weight_N)
    shape = (layout.rows, 2, hidden) if activation.gated else (layout.rows, hidden)
    return y_SM, h_NH.view(shape)


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    into: Gradients | None = None,
) -> Gradients:
    """Gradients of `experts_forward` from its inputs and H, those of parameters added to `into` if given.

    The router weight scales rows of width M (of x and of dy) and never rows of width H; an expert without rows gets
    zero gradients.
    """
    x_SM, dy_SM = x_SM.contiguous(), dy_SM.contiguous()
    hidden = weights.w2.shape[2]
    if into is None:
        dw1, dw2 = torch.empty_like(weights.w1), torch.empty_like(weights.w2)
        db1 = None if weights.b1 is None else torch.zeros_like(weights.b1)
        db2 = None if weights.b2 is None else torch.zeros_like(weights.b2)
    else:
        dw1, dw2, db1, db2 = into.w1, into.w2, into.b1, into.b2
    dx_NM = x_SM.new_empty((layout.rows, x_SM.shape[1]))
    ds_N = None if weight_N is None else x_SM.new_empty(layout.rows)
    factor_N1 = None if weight_N is None else weight_N.to(x_SM.dtype)[:, None]
    scratch, scratch_y = _Scratch(x_SM, layout), _Scratch(dy_SM, layout)
    act, da, a = (scratch.take(hidden) for _ in range(3))
    dh = scratch.take(activation.halves * hidden)
    h_NH = h_NH.view(layout.rows, activation.halves * hidden)
    for expert, count in enumerate(layout.counts):
        if count == 0 and into is None:
            dw1[expert].zero_()
            dw2[expert].zero_()
    first = -1  # the expert whose gradients the current block adds to
    for expert, start, stop in scratch.blocks(layout):
        rows = stop - start
        act_b, da_b, a_b, dh_b = act[:rows], da[:rows], a[:rows], dh[:rows]
        dy_b = scratch_y.gather(dy_SM, layout, start, stop)
        torch.mm(dy_b, weights.w2[expert], out=da_b)
        h = h_NH[start:stop]
        if activation.gated:
            g, u = h[:, :hidden], h[:, hidden:]
            activation.forward(g, act_b)
            torch.mul(act_b, u, out=a_b)
            torch.mul(da_b, act_b, out=dh_b[:, hidden:])
            torch.mul(da_b, u, out=act_b)
            activation.backward(act_b, g, dh_b[:, :hidden])
        else:
            activation.forward(h, a_b)
            activation.backward(da_b, h, dh_b)
        if ds_N is not None:
            # Two passes over what is cached; a product of a row and a column each takes four times as long.
            torch.sum(torch.mul(da_b, a_b, out=act_b), 1, out=ds_N[start:stop])
            if weights.b2 is not None:
                ds_N[start:stop] += dy_b[:, weights.b2_columns()] @ weights.b2[expert]
        torch.mm(dh_b, weights.up(expert), out=dx_NM[start:stop])
        x_b = scratch.gather(x_SM, layout, start, stop)
        if factor_N1 is not None:  # dW1 = (s·dH')ᵀ·x = dH'ᵀ·(s·x), dW2 = (s·dy)ᵀ·A
            x_b = torch.mul(x_b, factor_N1[start:stop], out=scratch.gathered(rows))
            dy_b = torch.mul(dy_b, factor_N1[start:stop], out=scratch_y.gathered(rows))
        beta = 1 if expert == first or into is not None else 0
        first = expert
        dw1_e, dw2_e = dw1[expert].view(-1, x_SM.shape[1]), dw2[expert]
        torch.addmm(dw1_e, dh_b.t(), x_b, beta=beta, out=dw1_e)
        torch.addmm(dw2_e, dy_b.t(), a_b, beta=beta, out=dw2_e)
        if db1 is not None:
            scaled = dh_b if factor_N1 is None else dh_b * factor_N1[start:stop]
            db1[expert] += scaled.sum(0).view(db1.shape[1:])
        if db2 is not None:
            db2[expert] += dy_b[:, weights.b2_columns()].sum(0)
    dx_SM = gather_sum(dx_NM, layout, weight_N)
    return Gradients(dx_SM, ds_N, dw1, dw2, db1, db2)


def _activate(h: Tensor, out: Tensor, activation: Activation) -> None:
    if activation.gated:
        hidden = out.shape[1]
        activation.forward(h[:, :hidden], out)
        out.mul_(h[:, hidden:])
    else:
        activation.forward(h, out)


class _Scratch:
    """Buffers of one block, reused from block to block."""

    def __init__(self, like: Tensor, layout: Layout) -> None:
        most = max(layout.counts, default=0)
        # In half precision a weight gradient must be one product: adding blocks would round after each.
        exact = like.dtype in (torch.float32, torch.float64)
        self._rows = min(most, _BLOCK_ROWS) if exact else most
        self._like = like
        self._gathered = self.take(like.shape[1])

    def take(self, width: int) -> Tensor:
        return self._like.new_empty((self._rows, width))

    def gathered(self, rows: int) -> Tensor:
        return self._gathered[:rows]

    def gather(self, x_SM: Tensor, layout: Layout, start: int, stop: int) -> Tensor:
        """The token rows of a block; a view where the rows lie in order already."""
        if layout.source_N is None:
            return x_SM[start:stop]
        return torch.index_select(x_SM, 0, layout.source_N[start:stop], out=self.gathered(stop - start))

    def blocks(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """(expert, start, stop), every expert's rows in even blocks, experts in order."""
        start = 0
        for expert, count in enumerate(layout.counts):
            parts = -(-count // self._rows) if count else 0
            for part in range(parts):
                yield expert, start + count * part // parts, start + count * (part + 1) // parts
            start += count
