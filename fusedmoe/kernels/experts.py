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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation, cached_rows, define_activation
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.layout import Layout

# Rows of a block: enough for full speed in the products; and sums of weight gradients are rarely read again.
_BLOCK_ROWS = 2048
# Bytes of each tensor in a slice of a block, for each thread: what activations read and write stays in its cache.
_SLICE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of the local experts.

    Attributes:
        w1: [e, 2, H, M] for a gated activation (first half g, second u), else [e, H, M].
        w2: [e, M, H]; its M may be another than w1's, and is the width of the results.
        b1: [e, 2, H] or [e, H], or None.
        b2: [e, m] or None; it is added to the m columns of the output from `b2_start` on (a shard of the experts
            owns a slice of the output bias, so that the sum over shards adds each column once).
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b2_start: int = 0

    def contiguous(self) -> Weights:
        """Returns these weights, with copies of those that are not contiguous; the kernels read no other."""
        w1, w2, b1, b2 = self.w1, self.w2, self.b1, self.b2
        no_copies = w1.is_contiguous() and w2.is_contiguous() and (b1 is None or b1.is_contiguous())
        if no_copies and (b2 is None or b2.is_contiguous()):
            return self
        b1, b2 = (None if bias is None else bias.contiguous() for bias in (b1, b2))
        return Weights(w1.contiguous(), w2.contiguous(), b1, b2, self.b2_start)

    def b2_columns(self) -> slice:
        """Returns the columns of the results that the output bias is added to."""
        assert self.b2 is not None
        return slice(self.b2_start, self.b2_start + self.b2.shape[1])


@dataclass(frozen=True, eq=False)
class Hidden:
    """Activations and their inputs' gradients by sorted row, which the gradients of parameters are made of.

    Either both times the rows' router weights or neither, as the device's kernels like it.

    Attributes:
        a_NH: [N, H].   dh_NH: [N, H], gated [N, 2·H].
    """

    a_NH: Tensor
    dh_NH: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of all inputs of `experts_forward`, like these; None where there was none."""

    x_SM: Tensor
    weight_N: Tensor | None
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None

    def added_to(self, others: Gradients) -> Gradients:
        """Returns these gradients, with the parameters' part added to that of `others`, in place."""

        def add(total: Tensor | None, mine: Tensor | None) -> Tensor | None:
            return None if total is None or mine is None else total.add_(mine)

        b1, b2 = add(others.b1, self.b1), add(others.b2, self.b2)
        return replace(self, w1=others.w1.add_(self.w1), w2=others.w2.add_(self.w2), b1=b1, b2=b2)


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
    # In plain torch, products add to what is there; the kernels, and sums in another dtype, are added afterwards.
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
    """Computes `experts_forward` in plain torch: any device and dtype."""
    x_SM, source_N, rows = x_SM.contiguous(), layout.source_N, layout.rows
    _, dim, hidden = weights.w2.shape
    gated, b1, b2, w1 = activation.gated, weights.b1, weights.b2, weights.w1.flatten(1, -2)
    h_NH = x_SM.new_empty((rows, w1.shape[1]))
    out_NM = x_SM.new_empty((rows, dim))
    blocks, most = _blocks(layout, x_SM.dtype)
    # Nothing of the size of all rows is made but H and the results.
    # Buffers of a block, used again by each.
    x_buffer, a_buffer = x_SM.new_empty((most, x_SM.shape[1])), x_SM.new_empty((most, hidden))
    step = cached_rows(hidden * x_SM.itemsize, _SLICE_BYTES)
    for expert, start, stop in blocks:
        count = stop - start
        h, a = h_NH[start:stop], a_buffer[:count]
        if source_N is None:
            x = x_SM[start:stop]  # a view: the rows lie in order already
        else:
            x = torch.index_select(x_SM, 0, source_N[start:stop], out=x_buffer[:count])
        torch.mm(x, w1[expert].t(), out=h)
        if b1 is not None:
            h.add_(b1[expert].view(-1))
        for first in range(0, count, step):
            h_part, a_part = h[first : first + step], a[first : first + step]
            if gated:
                activation.forward(h_part[:, :hidden], out=a_part)
                a_part.mul_(h_part[:, hidden:])
            else:
                activation.forward(h_part, out=a_part)
        torch.mm(a, weights.w2[expert].t(), out=out_NM[start:stop])
        if b2 is not None:
            out_NM[start:stop, weights.b2_columns()] += b2[expert]
    y_SM = gather_sum(out_NM, layout, weight_N)
    return y_SM, h_NH.view((rows, 2, hidden) if gated else (rows, hidden))


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
    """Computes `experts_backward` in plain torch, with `into` of the dtype of x_SM.

    The router weight scales rows of width M (of x and of dy) and never rows of width H; an expert without rows gets
    zero gradients.
    """
    blocks, most = _blocks(layout, x_SM.dtype)
    rows = _RowGradients(most, dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    parameters = _ParameterGradients(most, x_SM, layout, weight_N, weights, into)
    hidden = weights.w2.shape[2]
    a_buffer, dh_buffer = x_SM.new_empty((most, hidden)), x_SM.new_empty((most, activation.halves * hidden))
    for expert, start, stop in blocks:
        a, dh = a_buffer[: stop - start], dh_buffer[: stop - start]
        dy = rows.add(expert, start, stop, a, dh)
        parameters.add(expert, start, stop, a, dh, dy)
    dx_SM, dweight_N = gather_sum(rows.dx_NM, layout, weight_N), rows.dweight_N
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
    """Computes `experts_backward_rows` in plain torch."""
    blocks, most = _blocks(layout, x_SM.dtype)
    rows = _RowGradients(most, dy_SM, x_SM, h_NH, layout, weight_N, weights, activation)
    hidden = weights.w2.shape[2]
    left = Hidden(*(x_SM.new_empty((layout.rows, width)) for width in (hidden, activation.halves * hidden)))
    for expert, start, stop in blocks:
        rows.add(expert, start, stop, left.a_NH[start:stop], left.dh_NH[start:stop])
    return gather_sum(rows.dx_NM, layout, weight_N), rows.dweight_N, left


def plain_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor,
    left: Hidden,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
) -> Gradients:
    """Computes `experts_backward_weights` in plain torch, with `into` of the dtype of x_SM."""
    dy_SM, source_N = dy_SM.contiguous(), layout.source_N
    blocks, most = _blocks(layout, x_SM.dtype)
    parameters = _ParameterGradients(most, x_SM, layout, weight_N, weights, into)
    dy_buffer = dy_SM.new_empty((most, dy_SM.shape[1]))
    for expert, start, stop in blocks:
        if source_N is None:
            dy = dy_SM[start:stop]
        else:
            dy = torch.index_select(dy_SM, 0, source_N[start:stop], out=dy_buffer[: stop - start])
        parameters.add(expert, start, stop, left.a_NH[start:stop], left.dh_NH[start:stop], dy)
    return Gradients(x_SM[:0], None, parameters.dw1, parameters.dw2, parameters.db1, parameters.db2)


class _RowGradients:
    """The gradients of rows and of router weights, block by block.

    Args:
        most: rows of the largest block.
    Attributes:
        dx_NM: gradients of the rows of x, without their router weights.
        dweight_N: gradients of the router weights; None if there are none. Zero in padding rows.
    """

    def __init__(
        self,
        most: int,
        dy_SM: Tensor,
        x_SM: Tensor,
        h_NH: Tensor,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        activation: Activation,
    ) -> None:
        _, dim, hidden = weights.w2.shape
        rows = layout.rows
        self._weights, self._activation, self._hidden = weights, activation, hidden
        self._w1 = weights.w1.flatten(1, -2)
        self._h_NH = h_NH.view(rows, self._w1.shape[1])
        self._dy_SM, self._source_N = dy_SM.contiguous(), layout.source_N
        self._dy, self._da = dy_SM.new_empty((most, dim)), dy_SM.new_empty((most, hidden))
        self._act = dy_SM.new_empty((most, hidden))
        self._step = cached_rows(hidden * x_SM.itemsize, _SLICE_BYTES)
        self.dx_NM = x_SM.new_empty((rows, x_SM.shape[1]))
        self.dweight_N = None if weight_N is None else x_SM.new_zeros(rows)

    def add(self, expert: int, start: int, stop: int, a: Tensor, dh: Tensor) -> Tensor:
        """Computes a block's gradients; puts its activations into `a` and the gradients of their inputs into `dh`.

        Returns:
            The block's rows of dy.
        """
        weights, activation, hidden = self._weights, self._activation, self._hidden
        ds_N, step, count = self.dweight_N, self._step, stop - start
        h, da = self._h_NH[start:stop], self._da[:count]
        if self._source_N is None:
            dy = self._dy_SM[start:stop]
        else:
            dy = torch.index_select(self._dy_SM, 0, self._source_N[start:stop], out=self._dy[:count])
        torch.mm(dy, weights.w2[expert], out=da)
        for first in range(0, count, step):
            end = min(first + step, count)
            h_part, da_part, a_part, dh_part = h[first:end], da[first:end], a[first:end], dh[first:end]
            act = self._act[: end - first]
            if activation.gated:
                g, u = h_part[:, :hidden], h_part[:, hidden:]
                activation.forward(g, out=act)
                torch.mul(act, u, out=a_part)
                torch.mul(da_part, act, out=dh_part[:, hidden:])
                torch.mul(da_part, u, out=act)
                activation.backward(act, g, grad_input=dh_part[:, :hidden])
            else:
                activation.forward(h_part, out=a_part)
                activation.backward(da_part, h_part, grad_input=dh_part)
            if ds_N is not None:
                # Two passes over what is cached; a product of a row and a column each takes four times as long.
                torch.sum(torch.mul(da_part, a_part, out=act), 1, out=ds_N[start + first : start + end])
        if ds_N is not None and weights.b2 is not None:
            ds_N[start:stop] += dy[:, weights.b2_columns()] @ weights.b2[expert]
        torch.mm(dh, self._w1[expert], out=self.dx_NM[start:stop])
        return dy


class _ParameterGradients:
    """The gradients of parameters, block by block: the blocks of an expert follow each other.

    Args:
        most: rows of the largest block.
    """

    def __init__(
        self,
        most: int,
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
            self.dw1, self.dw2 = weights.w1.new_empty(weights.w1.shape), weights.w2.new_empty(weights.w2.shape)
            self.db1 = None if weights.b1 is None else torch.zeros_like(weights.b1)
            self.db2 = None if weights.b2 is None else torch.zeros_like(weights.b2)
            for expert, count in enumerate(layout.counts):
                if count == 0:
                    self.dw1[expert].zero_()
                    self.dw2[expert].zero_()
        else:
            self.dw1, self.dw2, self.db1, self.db2 = into.w1, into.w2, into.b1, into.b2
        self._dw1 = self.dw1.flatten(1, -2)  # a view
        self._x_SM, self._source_N = x_SM.contiguous(), layout.source_N
        scales = weight_N is not None
        self._x = x_SM.new_empty((most if scales or self._source_N is not None else 0, x_SM.shape[1]))
        self._dy = x_SM.new_empty((most if scales else 0, weights.w2.shape[1]))

    def add(self, expert: int, start: int, stop: int, a: Tensor, dh: Tensor, dy: Tensor) -> None:
        """Adds a block's gradients, from its activations, the gradients of their inputs, and those of its results."""
        count, factor_N1 = stop - start, self._factor_N1
        if self._source_N is None:
            x = self._x_SM[start:stop]
        else:
            x = torch.index_select(self._x_SM, 0, self._source_N[start:stop], out=self._x[:count])
        if factor_N1 is not None:  # dW1 = (s·dH')ᵀ·x = dH'ᵀ·(s·x), dW2 = (s·dy)ᵀ·A
            x = torch.mul(x, factor_N1[start:stop], out=self._x[:count])
            dy = torch.mul(dy, factor_N1[start:stop], out=self._dy[:count])
        # The first block of an expert overwrites, for what is there is new memory; the next ones add.
        beta = 1 if expert == self._last or self._into is not None else 0
        self._last = expert
        dw1, dw2 = self._dw1[expert], self.dw2[expert]
        torch.addmm(dw1, dh.t(), x, beta=beta, out=dw1)
        torch.addmm(dw2, dy.t(), a, beta=beta, out=dw2)
        if self.db1 is not None:
            scaled = dh if factor_N1 is None else dh * factor_N1[start:stop]
            self.db1[expert] += scaled.sum(0).view(self.db1.shape[1:])
        if self.db2 is not None:
            self.db2[expert] += dy[:, self._weights.b2_columns()].sum(0)


def _blocks(layout: Layout, dtype: torch.dtype) -> tuple[list[tuple[int, int, int]], int]:
    """Cuts every expert's rows into even blocks: (expert, start, stop) of each, experts in order; and the most rows."""
    most = max(layout.counts, default=0)
    # In half precision a weight gradient must be one product: adding blocks would round after each.
    if dtype in (torch.float32, torch.float64):
        most = min(most, _BLOCK_ROWS)
    blocks, start = [], 0
    for expert, count in enumerate(layout.counts):
        parts = -(-count // most) if count else 0
        for i in range(parts):
            blocks.append((expert, start + count * i // parts, start + count * (i + 1) // parts))
        start += count
    return blocks, most


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
