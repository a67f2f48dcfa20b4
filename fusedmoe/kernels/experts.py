"""Expert networks over rows grouped by expert: y_SM[s] = Σ over the kept rows n of s of weight_N[n]·FFN_e(x_SM[s]).

FFN_e(x) = act(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e. Gather, both products, activation, router weight and gather-and-sum are one
operation, so that nothing of the size of the routed rows has to be kept but the pre-activation H: the backward
recomputes A = act(H), and the router weight's gradient is ⟨dA', A⟩ (SonicMoE), which spares the down projection's
output.

Contract: tensors in, tensors out; no autograd; the caller owns every buffer that is returned. A backward is told which
gradients are `Wanted`, and neither computes nor reads what serves others alone: with frozen parameters it takes half of
the time, and x is not read.

In plain torch rows are worked through in blocks, so that no tensor of the size of H besides H itself is ever made, and
activations are applied in slices of these that stay in the cache. A block has rows of one expert, or of several whose
rows fit into the cache together: then all but the products is done for all of them at once. On CUDA that waits for the
device once, to learn the counts. Definition: `define_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation, cached_rows, define_activation
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.wanted import ALL, Wanted

# Rows of an expert in a block: enough for full speed in the products, and sums of weight gradients are rarely read
# again.
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
        a_NH: [N, H]; None unless that of W2 is wanted.
        dh_NH: [N, H], gated [N, 2·H]; None unless those of x, W1 or its bias are.
    """

    a_NH: Tensor | None
    dh_NH: Tensor | None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of all inputs of `experts_forward`, like these; None where there was none, or none was wanted."""

    x_SM: Tensor | None
    weight_N: Tensor | None
    w1: Tensor | None
    w2: Tensor | None
    b1: Tensor | None
    b2: Tensor | None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.w1, self.w2, self.b1, self.b2

    def added_to(self, totals: Gradients | None) -> Gradients:
        """Returns these gradients, with the parameters' part added to those of `totals`, if there are any, in place."""
        if totals is None:
            return self

        def add(total: Tensor | None, mine: Tensor | None) -> Tensor | None:
            return None if total is None or mine is None else total.add_(mine)

        w1, w2, b1, b2 = map(add, totals.parameters, self.parameters)
        return replace(self, w1=w1, w2=w2, b1=b1, b2=b2)


def experts_forward(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes y_SM and the pre-activation H of every row.

    Args:
        x_SM: tokens; layout says which rows copy which token, sorted by expert.
        weight_N: factor of each sorted row, or None for 1.
        shared: communication holds some of a GPU's multiprocessors meanwhile. Changes time and rounding only.
    Returns:
        y_SM like x_SM, and h_NH: [N, 2, H] or [N, H], to be kept for the backward.
    """
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_forward(x_SM, layout, weight_N, weights, activation, shared)
    x_SM, b1, b2 = x_SM.contiguous(), weights.b1, weights.b2
    _, dim, hidden = weights.w2.shape
    blocks, most, step = row_blocks(layout, x_SM, hidden)
    # Nothing of the size of all rows is made but H and the results; buffers of a block are used again by each.
    width, rows = activation.halves * hidden, layout.rows
    h_NH, out_NM = x_SM.new_empty((rows, width)), x_SM.new_empty((rows, dim))
    x_buffer, a_buffer = x_SM.new_empty((most, x_SM.shape[1])), x_SM.new_empty((most, hidden))
    # One call for the views of all experts: where these have few rows, a view costs as much as a product.
    w1_E, w2_E = weights.w1.flatten(1, -2).mT.unbind(), weights.w2.mT.unbind()
    for block in blocks:
        x, h, a, out = block.gather(x_SM, layout, x_buffer), block.of(h_NH), a_buffer[: block.rows], block.of(out_NM)
        for expert, x_e, h_e in block.by_expert(x, h):
            torch.mm(x_e, w1_E[expert], out=h_e)
            if b1 is not None:
                h_e.add_(b1[expert].view(-1))
        for h_part, a_part in zip(h.split(step), a.split(step), strict=True):
            if activation.gated:
                g, u = h_part.split(hidden, 1)
                activation.forward(g, out=a_part)
                a_part.mul_(u)
            else:
                activation.forward(h_part, out=a_part)
        for expert, a_e, out_e in block.by_expert(a, out):
            torch.mm(a_e, w2_E[expert], out=out_e)
            if b2 is not None:
                out_e[:, weights.b2_columns()].add_(b2[expert])
    return gather_sum(out_NM, layout, weight_N), h_NH.view(layout.rows, *weights.w1.shape[1:-1])


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor | None,
    h_NH: Tensor | None,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    into: Gradients | None = None,
    wanted: Wanted = ALL,
    shared: bool = False,
) -> Gradients:
    """Gradients of `experts_forward` from its inputs and H. An expert without rows gets zero gradients.

    Args:
        x_SM: None where no gradient of W1 is wanted.   h_NH: None where none but the output bias's is.
        into: gradients of other rows, to whose parameters' part this one's is added: in place, half precision in new
            float32 memory.
        wanted: what is computed; each is the same whatever else is, in plain torch to the last bit.
        shared: as of `experts_forward`.
    """
    if has_kernels(dy_SM):  # whose halves share nothing but what the first one leaves
        given = (layout, weight_N, weights)
        dx_SM, dweight_N, left = experts_backward_rows(dy_SM, h_NH, *given, activation, wanted, shared)
        grads = experts_backward_weights(dy_SM, x_SM, left, *given, into, wanted, shared)
        return replace(grads, x_SM=dx_SM, weight_N=dweight_N)
    # In one loop, so that a block is in the cache still when the second half comes to it.
    rows = _RowGradients(dy_SM, h_NH, layout, weight_N, weights, activation, wanted)
    parameters = _ParameterGradients(dy_SM, x_SM, layout, weight_N, weights, into, wanted, rows.most)
    a_buffer = dy_SM.new_empty((rows.most, weights.w2.shape[2])) if wanted.w2 else None
    needs_dh = wanted.x_SM or wanted.w1 or wanted.b1
    dh_buffer = dy_SM.new_empty((rows.most, rows.width)) if needs_dh else None
    for block in rows.blocks:
        a = None if a_buffer is None else a_buffer[: block.rows]
        dh = None if dh_buffer is None else dh_buffer[: block.rows]
        parameters.add(block, a, dh, rows.add(block, a, dh))
    return parameters.gradients(rows.dx_SM(), rows.dweight_N)


def experts_backward_rows(
    dy_SM: Tensor,
    h_NH: Tensor | None,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    wanted: Wanted = ALL,
    shared: bool = False,
) -> tuple[Tensor | None, Tensor | None, Hidden]:
    """The first half of `experts_backward`: gradients of x_SM and weight_N, and what the second half needs."""
    # What waits for rows need not wait for products that only parameters need (Lancet §4).
    if has_kernels(dy_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_backward_rows(dy_SM, h_NH, layout, weight_N, weights, activation, wanted, shared)
    rows = _RowGradients(dy_SM, h_NH, layout, weight_N, weights, activation, wanted)
    a_NH = dy_SM.new_empty((layout.rows, weights.w2.shape[2])) if wanted.w2 else None
    dh_NH = dy_SM.new_empty((layout.rows, rows.width)) if wanted.w1 or wanted.b1 else None
    # What no parameter needs takes the room of a block, as in one loop.
    dh_buffer = dy_SM.new_empty((rows.most, rows.width)) if dh_NH is None and wanted.x_SM else None
    for block in rows.blocks:
        dh = None if dh_buffer is None else dh_buffer[: block.rows]
        rows.add(block, None if a_NH is None else block.of(a_NH), dh if dh_NH is None else block.of(dh_NH))
    return rows.dx_SM(), rows.dweight_N, Hidden(a_NH, dh_NH)


def experts_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor | None,
    left: Hidden,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
    wanted: Wanted = ALL,
    shared: bool = False,
) -> Gradients:
    """The second half of `experts_backward`: the parameters' gradients, `x_SM` and `weight_N` None; `into` as there."""
    if not wanted.parameters:
        return Gradients(None, None, None, None, None, None)
    if has_kernels(dy_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_backward_weights(dy_SM, x_SM, left, layout, weight_N, weights, into, wanted, shared)
    dy_SM = dy_SM.contiguous()
    blocks, most, _ = row_blocks(layout, dy_SM, weights.w2.shape[2])
    parameters = _ParameterGradients(dy_SM, x_SM, layout, weight_N, weights, into, wanted, most)
    dy_buffer = dy_SM.new_empty((most, dy_SM.shape[1]))
    for block in blocks:
        a, dh = (None if hidden is None else block.of(hidden) for hidden in (left.a_NH, left.dh_NH))
        parameters.add(block, a, dh, block.gather(dy_SM, layout, dy_buffer))
    return parameters.gradients(None, None)


class _RowGradients:
    """The gradients of rows and of router weights, block by block, in plain torch.

    Attributes:
        blocks, most: of the rows, and the rows of the largest.
        width: of a row of H.
        dweight_N: gradients of the router weights; None if there are none. Zero in padding rows.
    """

    def __init__(
        self,
        dy_SM: Tensor,
        h_NH: Tensor | None,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        activation: Activation,
        wanted: Wanted,
    ) -> None:
        _, dim, hidden = weights.w2.shape
        self._layout, self._weight_N, self._weights, self._activation = layout, weight_N, weights, activation
        self.blocks, self.most, step = row_blocks(layout, dy_SM, hidden)
        self.width = activation.halves * hidden
        self._dy_SM, self._h_NH = dy_SM.contiguous(), None if h_NH is None else h_NH.view(layout.rows, self.width)
        self._w1_E, self._w2_E = weights.w1.flatten(1, -2).unbind(), weights.w2.unbind()
        self._dy, self._da = dy_SM.new_empty((self.most, dim)), dy_SM.new_empty((self.most, hidden))
        # Slices that stay in the cache; the second one for activations that no parameter needs.
        self._step = step
        self._act, self._a = (dy_SM.new_empty((min(self.most, step), hidden)) for _ in range(2))
        self._dx_NM = dy_SM.new_empty((layout.rows, weights.w1.shape[-1])) if wanted.x_SM else None
        self.dweight_N = dy_SM.new_zeros(layout.rows) if weight_N is not None and wanted.weight_N else None

    def add(self, block: _RowBlock, a: Tensor | None, dh: Tensor | None) -> Tensor:
        """Computes a block's gradients; puts its activations into `a` and the gradients of their inputs into `dh`, as
        far as these are given.

        Returns:
            The block's rows of dy.
        """
        activation, hidden, step = self._activation, self._act.shape[1], self._step
        dy = block.gather(self._dy_SM, self._layout, self._dy)
        ds = None if self.dweight_N is None else block.of(self.dweight_N)
        if self._h_NH is None or (a is dh is ds is None):
            return dy
        h, da = block.of(self._h_NH), self._da[: block.rows]
        if dh is not None or ds is not None:
            for expert, dy_e, da_e in block.by_expert(dy, da):
                torch.mm(dy_e, self._w2_E[expert], out=da_e)
        for first in range(0, block.rows, step):
            part = slice(first, first + step)
            h_part, da_part = h[part], da[part]
            act = self._act[: len(h_part)]
            a_part = self._a[: len(h_part)] if a is None else a[part]
            if activation.gated:
                g, u = h_part.split(hidden, 1)
                activation.forward(g, out=act)
                if a is not None or ds is not None:
                    torch.mul(act, u, out=a_part)
                if dh is not None:
                    dg, du = dh[part].split(hidden, 1)
                    torch.mul(da_part, act, out=du)
                    torch.mul(da_part, u, out=act)
                    activation.backward(act, g, grad_input=dg)
            else:
                if a is not None or ds is not None:
                    activation.forward(h_part, out=a_part)
                if dh is not None:
                    activation.backward(da_part, h_part, grad_input=dh[part])
            if ds is not None:
                # Two passes over what is cached; a product of a row and a column each takes four times as long.
                torch.sum(torch.mul(da_part, a_part, out=act), 1, out=ds[part])
        if ds is not None and self._weights.b2 is not None:
            for expert, dy_e, ds_e in block.by_expert(dy[:, self._weights.b2_columns()], ds):
                ds_e.add_(dy_e @ self._weights.b2[expert])
        if self._dx_NM is not None and dh is not None:
            for expert, dh_e, dx_e in block.by_expert(dh, block.of(self._dx_NM)):
                torch.mm(dh_e, self._w1_E[expert], out=dx_e)
        return dy

    def dx_SM(self) -> Tensor | None:
        """Sums the rows' gradients for each token; only here the router weights enter, where rows are M wide."""
        return None if self._dx_NM is None else gather_sum(self._dx_NM, self._layout, self._weight_N)


class _ParameterGradients:
    """The gradients of parameters, block by block in their order, in plain torch.

    The router weight scales rows of width M (of x and of dy) and never rows of width H.
    """

    def __init__(
        self,
        dy_SM: Tensor,
        x_SM: Tensor | None,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        into: Gradients | None,
        wanted: Wanted,
        most: int,
    ) -> None:
        self._wanted = wanted
        into = None if into is None else Gradients(None, None, *map(at_least_float32, into.parameters))
        # Products add to what is there; sums in another dtype, float32 beside half precision, are added to at the end.
        total = None if into is None else next(filter(torch.is_tensor, into.parameters), None)
        self._later = into if total is not None and total.dtype != dy_SM.dtype else None
        self._adds, self._last = into is not None and self._later is None, -1
        if into is None or self._later is not None:
            w1 = weights.w1.new_empty(weights.w1.shape) if wanted.w1 else None
            w2 = weights.w2.new_empty(weights.w2.shape) if wanted.w2 else None
            b1 = torch.zeros_like(weights.b1) if weights.b1 is not None and wanted.b1 else None
            b2 = torch.zeros_like(weights.b2) if weights.b2 is not None and wanted.b2 else None
            into = Gradients(None, None, w1, w2, b1, b2)
            for expert, count in enumerate(layout.counts):
                for matrix in (w1, w2) if count == 0 else ():
                    if matrix is not None:
                        matrix[expert].zero_()
        self._sums, self._layout, self._weights = into, layout, weights
        self._x_SM = x_SM.contiguous() if x_SM is not None and wanted.w1 else None
        self._factor_N1 = None if weight_N is None else weight_N.to(dy_SM.dtype)[:, None]
        self._dw1_E = () if into.w1 is None else into.w1.flatten(1, -2).unbind()
        self._dw2_E = () if into.w2 is None else into.w2.unbind()
        scaled = weight_N is not None
        x_rows = most if wanted.w1 and (scaled or layout.source_N is not None) else 0
        self._x = dy_SM.new_empty((x_rows, weights.w1.shape[-1]))
        self._dy = dy_SM.new_empty((most if scaled and (wanted.w2 or wanted.b2) else 0, weights.w2.shape[1]))

    def add(self, block: _RowBlock, a: Tensor | None, dh: Tensor | None, dy: Tensor) -> None:
        """Adds a block's gradients, from its activations, the gradients of their inputs, and those of its results."""
        factor = None if self._factor_N1 is None else block.of(self._factor_N1)
        wanted, db1, db2 = self._wanted, self._sums.b1, self._sums.b2
        # dW1 = (s·dH')ᵀ·x = dH'ᵀ·(s·x), dW2 = (s·dy)ᵀ·A
        if wanted.w1:
            assert self._x_SM is not None and dh is not None
            x = block.gather(self._x_SM, self._layout, self._x)
            if factor is not None:
                x = torch.mul(x, factor, out=self._x[: block.rows])
            self._add_products(block, self._dw1_E, dh, x)
        if factor is not None and (wanted.w2 or wanted.b2):
            dy = torch.mul(dy, factor, out=self._dy[: block.rows])
        if wanted.w2:
            assert a is not None
            self._add_products(block, self._dw2_E, dy, a)
        self._last = block.experts[-1]
        if db1 is not None and dh is not None:
            for expert, dh_e in block.by_expert(dh if factor is None else dh * factor):
                db1[expert].add_(dh_e.sum(0).view(db1.shape[1:]))
        if db2 is not None:
            for expert, dy_e in block.by_expert(dy[:, self._weights.b2_columns()]):
                db2[expert].add_(dy_e.sum(0))

    def _add_products(self, block: _RowBlock, out_E: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        """Adds leftᵀ·right of each expert's rows of a block."""
        last = self._last
        columns = left.t().split(block.sizes, 1)
        for (expert, right_e), left_e in zip(block.by_expert(right), columns, strict=True):
            # The first rows of an expert overwrite, for what is there is new memory; the next ones add.
            if self._adds or expert == last:
                # As `addmm_`, which PyTorch's counter of FLOPs does not know.
                torch.addmm(out_E[expert], left_e, right_e, out=out_E[expert])
            else:
                torch.mm(left_e, right_e, out=out_E[expert])
            last = expert

    def gradients(self, dx_SM: Tensor | None, dweight_N: Tensor | None) -> Gradients:
        """Returns all gradients, by those of the rows."""
        return replace(self._sums, x_SM=dx_SM, weight_N=dweight_N).added_to(self._later)


@dataclass
class _RowBlock:
    """Sorted rows from `start` on that are worked through together: `sizes[i]` rows of expert `experts[i]`, in turn."""

    start: int
    experts: list[int]
    sizes: list[int]
    rows: int

    def of(self, value_N: Tensor) -> Tensor:
        """Returns this block's part of what all sorted rows have."""
        return value_N[self.start : self.start + self.rows]

    def gather(self, x_SM: Tensor, layout: Layout, buffer: Tensor) -> Tensor:
        """Returns the tokens that the rows copy: a view where they lie in order already, else in the buffer."""
        if layout.source_N is None:
            return self.of(x_SM)
        return torch.index_select(x_SM, 0, self.of(layout.source_N), out=buffer[: self.rows])

    def by_expert(self, *values: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields each expert, and its rows of the block's values.

        One call makes the views of all experts: where these have few rows, a view costs as much as a product.
        """
        return zip(self.experts, *(value.split(self.sizes) for value in values), strict=True)


def row_blocks(layout: Layout, like: Tensor, hidden: int) -> tuple[list[_RowBlock], int, int]:
    """Cuts sorted rows into blocks, experts in order.

    Args:
        like: tokens, [S, M].
    Returns:
        the blocks, the most rows of one, and how many rows of width H stay in the cache.
    """
    step = cached_rows(hidden * like.itemsize, _SLICE_BYTES)
    together = min(step, cached_rows(like.shape[1] * like.itemsize, _SLICE_BYTES))
    most = max(layout.counts, default=0)
    # In half precision a weight gradient must be one product: adding blocks would round after each.
    if like.dtype in (torch.float32, torch.float64):
        most = min(most, _BLOCK_ROWS)
    blocks: list[_RowBlock] = []
    start = 0
    for expert, count in enumerate(layout.counts):
        parts = -(-count // most) if count else 0
        for i in range(parts):
            rows = count * (i + 1) // parts - count * i // parts
            if blocks and blocks[-1].rows + rows <= together:
                blocks[-1].experts.append(expert)
                blocks[-1].sizes.append(rows)
                blocks[-1].rows += rows
            else:
                blocks.append(_RowBlock(start, [expert], [rows], rows))
            start += rows
    return blocks, max((block.rows for block in blocks), default=0), step


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
