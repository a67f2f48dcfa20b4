"""Expert networks over rows grouped by expert: y_SM[s] = Σ over the kept rows n of s of weight_N[n]·FFN_e(x_SM[s]).

FFN_e(x) = act(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e. Gather, both products, activation, router weight and gather-and-sum are one
operation, so that nothing of the size of the routed rows has to be kept but the pre-activation H: the backward
recomputes A = act(H), and the router weight's gradient is ⟨dA', A⟩ (SonicMoE), which spares the down projection's
output.

Contract: tensors in, tensors out; no autograd; the caller owns every buffer that is returned.

In plain torch the rows of an expert are worked through in blocks, so that no tensor of the size of H besides H itself
is ever made, and activations are applied in slices of these that stay in the cache. On CUDA that waits for the device
once, to learn the counts. Definition: `define_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation, cached_slices, define_activation
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Gradients, Hidden, Weights

# Rows of a block: enough for full speed in the products; and sums of weight gradients are rarely read again.
_BLOCK_ROWS = 2048
# Bytes of each tensor in a slice of a block, for each thread: what activations read and write stays in its cache.
_SLICE_BYTES = 1 << 18


def experts_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Computes y_SM and the pre-activation H of every row.

    Args:
        x_SM: tokens; layout says which rows copy which token, sorted by expert.
        weight_N: factor of each sorted row, or None for 1.
    Returns:
        y_SM like x_SM, and h_NH: [N, 2, H] or [N, H], to be kept for the backward.
    """
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_forward(x_SM, layout, weight_N, weights, activation)
    return plain_forward(x_SM, layout, weight_N, weights, activation)


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
    """Gradients of `experts_forward` from its inputs and H. An expert without rows gets zero gradients.

    `into`: gradients of other rows, in at least float32, to whose parameters' part this one's is added in place.
    """
    if not has_kernels(x_SM) and (into is None or into.w1.dtype == x_SM.dtype):
        return plain_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation, into)
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        own = experts.experts_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    else:
        own = plain_backward(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    return own if into is None else own.added_to(into)


def experts_backward_rows(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Hidden]:
    """The first half of `experts_backward`: gradients of x_SM and weight_N, and what the second half needs.

    What waits for rows need not wait for products that only parameters need (Lancet §4).
    """
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_backward_rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    return plain_backward_rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)


def experts_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor,
    left: Hidden,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
) -> Gradients:
    """The second half of `experts_backward`: the parameters' gradients, its `x_SM` and `weight_N` without meaning.

    `into`: gradients of other rows, in at least float32, to which these are added in place.
    """
    if not has_kernels(x_SM) and (into is None or into.w1.dtype == x_SM.dtype):
        return plain_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights, into)
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        own = experts.experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights)
    else:
        own = plain_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights)
    return own if into is None else own.added_to(into)


def plain_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """`experts_forward` in plain torch: any device and dtype."""
    x_SM = x_SM.contiguous()
    hidden, dim = weights.w2.shape[2], weights.w2.shape[1]
    h_NH = x_SM.new_empty((layout.rows, activation.halves * hidden))
    out_NM = x_SM.new_empty((layout.rows, dim))
    scratch = _Scratch(x_SM, layout)
    a = scratch.take(hidden)
    for expert, start, stop in scratch.blocks(layout):
        rows = stop - start
        h = h_NH[start:stop]
        torch.mm(scratch.gather(start, stop), weights.up(expert).t(), out=h)
        if weights.b1 is not None:
            h.add_(weights.b1[expert].view(-1))
        _activate(h, a[:rows], activation)
        torch.mm(a[:rows], weights.w2[expert].t(), out=out_NM[start:stop])
        if weights.b2 is not None:
            out_NM[start:stop, weights.b2_columns()] += weights.b2[expert]
    y_SM = gather_sum(out_NM, layout, weight_N)
    shape = (layout.rows, 2, hidden) if activation.gated else (layout.rows, hidden)
    return y_SM, h_NH.view(shape)


def plain_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    into: Gradients | None = None,
) -> Gradients:
    """`experts_backward` in plain torch, with `into` of the dtype of x_SM.

    The router weight scales rows of width M (of x and of dy) and never rows of width H; an expert without rows gets
    zero gradients.
    """
    rows = _Rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    parameters = _Parameters(dy_SM, x_SM, layout, weight_N, weights, into)
    hidden = weights.w2.shape[2]
    a, dh = rows.scratch.take(hidden), rows.scratch.take(activation.halves * hidden)
    for expert, start, stop in rows.scratch.blocks(layout):
        block = slice(0, stop - start)
        dy_b = rows.add(expert, start, stop, a[block], dh[block])
        parameters.add(expert, start, stop, a[block], dh[block], dy_b)
    dx_SM, dweight_N = rows.gradients()
    return Gradients(dx_SM, dweight_N, parameters.dw1, parameters.dw2, parameters.db1, parameters.db2)


def plain_backward_rows(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Hidden]:
    """`experts_backward_rows` in plain torch."""
    rows = _Rows(dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    hidden = weights.w2.shape[2]
    left = Hidden(*(x_SM.new_empty((layout.rows, width)) for width in (hidden, activation.halves * hidden)))
    for expert, start, stop in rows.scratch.blocks(layout):
        rows.add(expert, start, stop, left.a_NH[start:stop], left.dh_NH[start:stop])
    return *rows.gradients(), left


def plain_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor,
    left: Hidden,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
) -> Gradients:
    """`experts_backward_weights` in plain torch, with `into` of the dtype of x_SM."""
    parameters = _Parameters(dy_SM, x_SM, layout, weight_N, weights, into)
    scratch_y = _Scratch(dy_SM.contiguous(), layout)
    for expert, start, stop in parameters.scratch.blocks(layout):
        dy_b = scratch_y.gather(start, stop)
        parameters.add(expert, start, stop, left.a_NH[start:stop], left.dh_NH[start:stop], dy_b)
    return Gradients(x_SM[:0], None, parameters.dw1, parameters.dw2, parameters.db1, parameters.db2)


class _Rows:
    """The gradients of rows and of router weights, block by block."""

    def __init__(
        self,
        dy_SM: Tensor,
        x_SM: Tensor,
        h_NH: Tensor,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        activation: Activation,
    ) -> None:
        self._layout, self._weight_N = layout, weight_N
        self._weights, self._activation, self._hidden = weights, activation, weights.w2.shape[2]
        self._h_NH = h_NH.view(layout.rows, activation.halves * self._hidden)
        self._dx_NM = x_SM.new_empty((layout.rows, x_SM.shape[1]))
        self._ds_N = None if weight_N is None else x_SM.new_zeros(layout.rows)  # padding has no gradient
        self.scratch = _Scratch(dy_SM.contiguous(), layout)
        self._act, self._da = self.scratch.take(self._hidden), self.scratch.take(self._hidden)

    def add(self, expert: int, start: int, stop: int, a_b: Tensor, dh_b: Tensor) -> Tensor:
        """Adds a block's gradients; its activations are put into a_b and the gradients of their inputs into dh_b.

        Returns:
            The block's rows of dy.
        """
        weights, da_b = self._weights, self._da[: stop - start]
        dy_b = self.scratch.gather(start, stop)
        torch.mm(dy_b, weights.w2[expert], out=da_b)
        for part in cached_slices(len(a_b), a_b.shape[1] * a_b.itemsize, _SLICE_BYTES):
            self._add_slice(slice(start + part.start, start + part.stop), da_b[part], a_b[part], dh_b[part])
        if self._ds_N is not None and weights.b2 is not None:
            self._ds_N[start:stop] += dy_b[:, weights.b2_columns()] @ weights.b2[expert]
        torch.mm(dh_b, weights.up(expert), out=self._dx_NM[start:stop])
        return dy_b

    def _add_slice(self, rows: slice, da: Tensor, a: Tensor, dh: Tensor) -> None:
        activation, hidden, h = self._activation, self._hidden, self._h_NH[rows]
        act = self._act[: len(da)]
        if activation.gated:
            g, u = h[:, :hidden], h[:, hidden:]
            activation.forward(g, act)
            torch.mul(act, u, out=a)
            torch.mul(da, act, out=dh[:, hidden:])
            torch.mul(da, u, out=act)
            activation.backward(act, g, dh[:, :hidden])
        else:
            activation.forward(h, a)
            activation.backward(da, h, dh)
        if self._ds_N is not None:
            # Two passes over what is cached; a product of a row and a column each takes four times as long.
            torch.sum(torch.mul(da, a, out=act), 1, out=self._ds_N[rows])

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of x_SM and of weight_N."""
        return gather_sum(self._dx_NM, self._layout, self._weight_N), self._ds_N


class _Parameters:
    """The gradients of parameters, block by block: those of an expert's blocks follow each other."""

    def __init__(
        self,
        dy_SM: Tensor,
        x_SM: Tensor,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        into: Gradients | None,
    ) -> None:
        self._weights, self._into, self._last = weights, into, -1
        self._factor_N1 = None if weight_N is None else weight_N.to(x_SM.dtype)[:, None]
        self.db1: Tensor | None
        self.db2: Tensor | None
        if into is None:
            self.dw1, self.dw2 = (matrix.new_empty(matrix.shape) for matrix in (weights.w1, weights.w2))
            self.db1 = None if weights.b1 is None else torch.zeros_like(weights.b1)
            self.db2 = None if weights.b2 is None else torch.zeros_like(weights.b2)
        else:
            self.dw1, self.dw2, self.db1, self.db2 = into.w1, into.w2, into.b1, into.b2
        for expert, count in enumerate(layout.counts):
            if count == 0 and into is None:
                self.dw1[expert].zero_()
                self.dw2[expert].zero_()
        self.scratch = _Scratch(x_SM.contiguous(), layout)
        self._scaled_dy = None if weight_N is None else self.scratch.take(weights.w2.shape[1])

    def add(self, expert: int, start: int, stop: int, a_b: Tensor, dh_b: Tensor, dy_b: Tensor) -> None:
        """Adds a block's gradients, from its activations, the gradients of their inputs, and those of its results."""
        rows, factor_N1 = stop - start, self._factor_N1
        x_b = self.scratch.gather(start, stop)
        if factor_N1 is not None and self._scaled_dy is not None:  # dW1 = (s·dH')ᵀ·x = dH'ᵀ·(s·x), dW2 = (s·dy)ᵀ·A
            x_b = torch.mul(x_b, factor_N1[start:stop], out=self.scratch.gathered(rows))
            dy_b = torch.mul(dy_b, factor_N1[start:stop], out=self._scaled_dy[:rows])
        beta = 1 if expert == self._last or self._into is not None else 0
        self._last = expert
        dw1_e, dw2_e = self.dw1[expert].view(-1, x_b.shape[1]), self.dw2[expert]
        torch.addmm(dw1_e, dh_b.t(), x_b, beta=beta, out=dw1_e)
        torch.addmm(dw2_e, dy_b.t(), a_b, beta=beta, out=dw2_e)
        if self.db1 is not None:
            scaled = dh_b if factor_N1 is None else dh_b * factor_N1[start:stop]
            self.db1[expert] += scaled.sum(0).view(self.db1.shape[1:])
        if self.db2 is not None:
            self.db2[expert] += dy_b[:, self._weights.b2_columns()].sum(0)


def _activate(h_b: Tensor, a_b: Tensor, activation: Activation) -> None:
    for part in cached_slices(len(a_b), a_b.shape[1] * a_b.itemsize, _SLICE_BYTES):
        h, a = h_b[part], a_b[part]
        if activation.gated:
            activation.forward(h[:, : a.shape[1]], a)
            a.mul_(h[:, a.shape[1] :])
        else:
            activation.forward(h, a)


class _Scratch:
    """Buffers of one block of x_SM's rows, reused from block to block."""

    def __init__(self, x_SM: Tensor, layout: Layout) -> None:
        most = max(layout.counts, default=0)
        # In half precision a weight gradient must be one product: adding blocks would round after each.
        exact = x_SM.dtype in (torch.float32, torch.float64)
        self._rows = min(most, _BLOCK_ROWS) if exact else most
        self._x_SM, self._source_N = x_SM, layout.source_N
        self._gathered = self.take(x_SM.shape[1])

    def take(self, width: int) -> Tensor:
        return self._x_SM.new_empty((self._rows, width))

    def gathered(self, rows: int) -> Tensor:
        return self._gathered[:rows]

    def gather(self, start: int, stop: int) -> Tensor:
        """The token rows of a block; a view where the rows lie in order already."""
        if self._source_N is None:
            return self._x_SM[start:stop]
        return torch.index_select(self._x_SM, 0, self._source_N[start:stop], out=self.gathered(stop - start))

    def blocks(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """(expert, start, stop), every expert's rows in even blocks, experts in order."""
        start = 0
        for expert, count in enumerate(layout.counts):
            parts = -(-count // self._rows) if count else 0
            for part in range(parts):
                yield expert, start + count * part // parts, start + count * (part + 1) // parts
            start += count


def define_experts(x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: str) -> Tensor:
    """Defines the experts' operation in plain differentiable torch, row by row."""
    y_SM = [x_SM.new_zeros(weights.w2.shape[1]) for _ in x_SM]
    expert_N = [e for e, count in enumerate(layout.counts) for _ in range(count)]
    source_N = range(len(expert_N)) if layout.source_N is None else layout.source_N.tolist()
    for n, (e, s) in enumerate(zip(expert_N, source_N, strict=True)):
        h = (weights.w1[e] * x_SM[s]).sum(-1)
        if weights.b1 is not None:
            h = h + weights.b1[e]
        y = (weights.w2[e] * define_activation(activation, h)).sum(-1)
        if weights.b2 is not None:
            start = weights.b2_start
            y = y + torch.nn.functional.pad(weights.b2[e], (start, len(y) - start - weights.b2.shape[1]))
        y_SM[s] = y_SM[s] + (y if weight_N is None else y * weight_N[n])
    return torch.stack(y_SM) if y_SM else x_SM.new_zeros(0, weights.w2.shape[1])
