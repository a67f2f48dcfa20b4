"""Expert MLPs over rows grouped by expert, fused with gather, router weights and combine. Not differentiable.

y_SM[s] = Σ over the kept rows n of token s of weight_N[n]·FFN_e(x_SM[s]), FFN_e(x) = act(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e.

Only the pre-activation H, N·H elements, is saved for backward, which recomputes A = act(H). The router weight's
gradient is ⟨dA', A⟩ (SonicMoE), so the output of the down projection is not needed.

Plain PyTorch processes rows in blocks, so H is the only tensor of its size, and applies activations in slices that fit
in cache. A block has rows of one expert, or of several experts whose rows fit in cache together. On CUDA this path
synchronizes with the device once, for the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation, define_activation, rows_in_cache
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.needs_grad import ALL, NeedsGrad

# Rows of one expert per block: enough for full GEMM speed, with few re-reads of the weight gradient sums.
_BLOCK_ROWS = 2048
# Bytes per thread of each tensor in a slice of a block, which keep activation inputs and outputs in cache.
_SLICE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Weights:
    """Parameters of the local experts.

    Attributes:
        w1: [e, 2, H, M] for a gated activation (first half g, second u), else [e, H, M].
        w2: [e, M', H]; the output width M' may differ from M.
        b1: [e, 2, H] or [e, H], or None.
        b2: [e, m] or None, added to the m output columns from `b2_start` on: each shard of the experts adds its slice.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b2_start: int = 0

    def contiguous(self) -> Weights:
        b1 = None if self.b1 is None else self.b1.contiguous()
        b2 = None if self.b2 is None else self.b2.contiguous()
        return Weights(self.w1.contiguous(), self.w2.contiguous(), b1, b2, self.b2_start)

    def b2_columns(self) -> slice:
        assert self.b2 is not None
        return slice(self.b2_start, self.b2_start + self.b2.shape[1])

    def matrices(self, transposed: bool = False) -> tuple[Sequence[Tensor], Sequence[Tensor], tuple[int, int, int]]:
        """Return the matrices of both GEMMs by expert, [out, in] or transposed, and M, M' and H."""
        # For experts with few rows, creating a view takes as long as a GEMM.
        up, down = self.w1.flatten(1, -2), self.w2
        sizes = up.shape[2], down.shape[1], down.shape[2]
        if transposed:
            up, down = up.mT, down.mT
        return up.unbind(), down.unbind(), sizes


@dataclass(frozen=True, eq=False)
class HiddenRows:
    """Intermediates by sorted row from which parameter gradients are computed.

    Both tensors are scaled by the router weights (device kernels) or neither is (plain PyTorch).

    Attributes:
        a_NH: activations, [N, H]; None unless W2 needs a gradient.
        dh_NH: gradients of the pre-activations, [N, H], gated [N, 2·H]; None unless x, W1 or b1 needs a gradient.
    """

    a_NH: Tensor | None
    dh_NH: Tensor | None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of the inputs of `experts_forward`; None where the input is None or its gradient was not requested."""

    x_SM: Tensor | None
    weight_N: Tensor | None
    w1: Tensor | None
    w2: Tensor | None
    b1: Tensor | None
    b2: Tensor | None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.w1, self.w2, self.b1, self.b2


def experts_forward(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the expert outputs y_SM and the pre-activations H, [N, 2, H] or [N, H].

    Args:
        weight_N: router weight of each sorted row; None for 1.
        shared: communication occupies some multiprocessors of the GPU. Affects time and rounding only.
    """
    if has_kernels(x_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_forward(x_SM, layout, weight_N, weights, activation, shared)
    h_NH = x_SM.new_empty((layout.rows, activation.num_projections * weights.w2.shape[2]))
    y_SM = forward_blocks(x_SM, layout, weight_N, weights, activation, h_NH)
    return y_SM, h_NH.view(len(h_NH), *weights.w1.shape[1:-1])


def forward_blocks(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Any,
    activation: Activation,
    h_NH: Tensor,
    adapters: Sequence[Any] = (None, None),
) -> Tensor:
    """Compute y_SM block by block in plain PyTorch, and write the pre-activations to h_NH.

    Args:
        weights: `Weights` or `low_rank.StoredWeights`.
        adapters: of both GEMMs; `add(block, rows, out)` adds an adapter's products with a block of rows.
    """
    x_SM, b1, b2, (up, down) = x_SM.contiguous(), weights.b1, weights.b2, adapters
    w1_E, w2_E, (_, dim, hidden) = weights.matrices(transposed=True)
    blocks, max_rows, step = row_blocks(layout, x_SM, hidden)
    out_NM = x_SM.new_empty((len(h_NH), dim))
    x_buffer, a_buffer = x_SM.new_empty((max_rows, x_SM.shape[1])), x_SM.new_empty((max_rows, hidden))
    for block in blocks:
        x, h, a, out = block.gather(x_SM, layout, x_buffer), block.of(h_NH), a_buffer[: block.rows], block.of(out_NM)
        for expert, x_e, h_e in block.by_expert(x, h):
            torch.mm(x_e, w1_E[expert], out=h_e)
        if up is not None:
            up.add(block, x, h)
        if b1 is not None:
            for expert, h_e in block.by_expert(h):
                h_e.add_(b1[expert].view(-1))
        for h_part, a_part in zip(h.split(step), a.split(step), strict=True):
            activation.apply(h_part, a_part)
        for expert, a_e, out_e in block.by_expert(a, out):
            torch.mm(a_e, w2_E[expert], out=out_e)
        if down is not None:
            down.add(block, a, out)
        if b2 is not None:
            for expert, out_e in block.by_expert(out[:, weights.b2_columns()]):
                out_e.add_(b2[expert])
    return gather_sum(out_NM, layout, weight_N)


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor | None,
    h_NH: Tensor | None,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    into: Gradients | None = None,
    needs_grad: NeedsGrad = ALL,
    shared: bool = False,
) -> Gradients:
    """Compute the gradients of `experts_forward` from its inputs and H. An expert without rows gets zero gradients.

    Args:
        x_SM: may be None if W1 needs no gradient.
        h_NH: may be None if at most the output bias needs a gradient.
        into: parameter gradients of other rows to accumulate into: in place, or in new float32 tensors if they are in
            half precision.
        needs_grad: gradients to compute. The selection does not change a gradient (bitwise, in plain PyTorch).
        shared: as in `experts_forward`.
    """
    if has_kernels(dy_SM):  # the halves share only the intermediates
        given = (layout, weight_N, weights)
        dx_SM, dweight_N, intermediates = experts_backward_rows(dy_SM, h_NH, *given, activation, needs_grad, shared)
        grads = experts_backward_weights(dy_SM, x_SM, intermediates, *given, into, needs_grad, shared)
        return replace(grads, x_SM=dx_SM, weight_N=dweight_N)
    # One loop for both halves keeps each block in cache.
    rows = RowGradients(dy_SM, h_NH, layout, weight_N, weights, activation, needs_grad)
    parameters = _ParameterGradients(dy_SM, x_SM, layout, weight_N, weights, into, needs_grad, rows.max_rows)
    a_buffer = dy_SM.new_empty((rows.max_rows, weights.w2.shape[2])) if needs_grad.w2 else None
    needs_dh = needs_grad.x_SM or needs_grad.w1 or needs_grad.b1
    dh_buffer = dy_SM.new_empty((rows.max_rows, rows.width)) if needs_dh else None
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
    needs_grad: NeedsGrad = ALL,
    shared: bool = False,
) -> tuple[Tensor | None, Tensor | None, HiddenRows]:
    """Compute the first half of `experts_backward`: dx_SM, dweight_N and the intermediates for the second half.

    Consumers of dx need not wait for the weight-gradient GEMMs (Lancet §4).
    """
    if has_kernels(dy_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_backward_rows(dy_SM, h_NH, layout, weight_N, weights, activation, needs_grad, shared)
    rows = RowGradients(dy_SM, h_NH, layout, weight_N, weights, activation, needs_grad)
    a_NH = dy_SM.new_empty((layout.rows, weights.w2.shape[2])) if needs_grad.w2 else None
    dh_NH = dy_SM.new_empty((layout.rows, rows.width)) if needs_grad.w1 or needs_grad.b1 else None
    # dH that no parameter needs is one block of scratch space.
    dh_buffer = dy_SM.new_empty((rows.max_rows, rows.width)) if dh_NH is None and needs_grad.x_SM else None
    for block in rows.blocks:
        dh = None if dh_buffer is None else dh_buffer[: block.rows]
        rows.add(block, None if a_NH is None else block.of(a_NH), dh if dh_NH is None else block.of(dh_NH))
    return rows.dx_SM(), rows.dweight_N, HiddenRows(a_NH, dh_NH)


def experts_backward_weights(
    dy_SM: Tensor,
    x_SM: Tensor | None,
    intermediates: HiddenRows,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    into: Gradients | None = None,
    needs_grad: NeedsGrad = ALL,
    shared: bool = False,
) -> Gradients:
    """Compute the second half of `experts_backward`: the parameter gradients, with `x_SM` and `weight_N` None."""
    if not needs_grad.parameters:
        return Gradients(None, None, None, None, None, None)
    if has_kernels(dy_SM):
        from fusedmoe.kernels.triton import experts

        return experts.experts_backward_weights(
            dy_SM, x_SM, intermediates, layout, weight_N, weights, into, needs_grad, shared
        )
    dy_SM = dy_SM.contiguous()
    blocks, max_rows, _ = row_blocks(layout, dy_SM, weights.w2.shape[2])
    parameters = _ParameterGradients(dy_SM, x_SM, layout, weight_N, weights, into, needs_grad, max_rows)
    dy_buffer = dy_SM.new_empty((max_rows, dy_SM.shape[1]))
    for block in blocks:
        a, dh = (None if hidden is None else block.of(hidden) for hidden in (intermediates.a_NH, intermediates.dh_NH))
        parameters.add(block, a, dh, block.gather(dy_SM, layout, dy_buffer))
    return parameters.gradients(None, None)


class RowGradients:
    """Gradients of rows and router weights, accumulated block by block in plain PyTorch.

    `hidden` and `width` are the widths of rows of A and H. `dweight_N` is zero in padding rows, and None if not
    requested. `weights` and `adapters` are as in `forward_blocks`; `add_input_gradient(block, dout, din)` adds the
    gradient through an adapter.
    """

    def __init__(
        self,
        dy_SM: Tensor,
        h_NH: Tensor | None,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Any,
        activation: Activation,
        needs_grad: NeedsGrad,
        adapters: Sequence[Any] = (None, None),
    ) -> None:
        self._w1_E, self._w2_E, (input_dim, dim, hidden) = weights.matrices()
        self._layout, self._weight_N, self._weights, self._activation = layout, weight_N, weights, activation
        rows = layout.rows
        self._up, self._down = adapters
        self.blocks, self.max_rows, step = row_blocks(layout, dy_SM, hidden)
        self.hidden, self.width = hidden, activation.num_projections * hidden
        self._dy_SM, self._h_NH = dy_SM.contiguous(), None if h_NH is None else h_NH.view(rows, self.width)
        self._dy, self._da = dy_SM.new_empty((self.max_rows, dim)), dy_SM.new_empty((self.max_rows, hidden))
        # `_a` holds activations that no parameter gradient needs.
        self._step = step
        part_rows = min(self.max_rows, step)
        self._act, self._a = dy_SM.new_empty((part_rows, hidden)), dy_SM.new_empty((part_rows, hidden))
        self._dx_NM = dy_SM.new_empty((rows, input_dim)) if needs_grad.x_SM else None
        self.dweight_N = dy_SM.new_zeros(rows) if weight_N is not None and needs_grad.weight_N else None

    def add(self, block: _RowBlock, a: Tensor | None, dh: Tensor | None) -> Tensor:
        """Compute one block's gradients, fill `a` (activations) and `dh`, if given, and return dy of its rows."""
        dy = block.gather(self._dy_SM, self._layout, self._dy)
        ds = None if self.dweight_N is None else block.of(self.dweight_N)
        if self._h_NH is None or (a is dh is ds is None):
            return dy
        h, da = block.of(self._h_NH), self._da[: block.rows]
        if dh is not None or ds is not None:
            for expert, dy_e, da_e in block.by_expert(dy, da):
                torch.mm(dy_e, self._w2_E[expert], out=da_e)
            if self._down is not None:
                self._down.add_input_gradient(block, dy, da)
        for first in range(0, block.rows, self._step):
            part = slice(first, first + self._step)
            h_part, da_part = h[part], da[part]
            act = self._act[: len(h_part)]
            a_part = a[part] if a is not None else None if ds is None else self._a[: len(h_part)]
            self._activation.apply_backward(h_part, da_part, a_part, None if dh is None else dh[part], act)
            if ds is not None:
                # Two passes over cached data; a batched row-by-column product takes four times as long.
                assert a_part is not None
                torch.sum(torch.mul(da_part, a_part, out=act), 1, out=ds[part])
        if ds is not None and self._weights.b2 is not None:
            for expert, dy_e, ds_e in block.by_expert(dy[:, self._weights.b2_columns()], ds):
                ds_e.add_(dy_e @ self._weights.b2[expert])
        dx = None if self._dx_NM is None or dh is None else block.of(self._dx_NM)
        if dx is not None and dh is not None:
            for expert, dh_e, dx_e in block.by_expert(dh, dx):
                torch.mm(dh_e, self._w1_E[expert], out=dx_e)
        if self._up is not None:
            self._up.add_input_gradient(block, dh, dx)
        return dy

    def dx_SM(self) -> Tensor | None:
        return None if self._dx_NM is None else gather_sum(self._dx_NM, self._layout, self._weight_N)


class _ParameterGradients:
    """Parameter gradients, accumulated block by block in order, in plain PyTorch.

    The router weight scales rows of width M (x and dy), never rows of width H.
    """

    def __init__(
        self,
        dy_SM: Tensor,
        x_SM: Tensor | None,
        layout: Layout,
        weight_N: Tensor | None,
        weights: Weights,
        into: Gradients | None,
        needs_grad: NeedsGrad,
        max_rows: int,
    ) -> None:
        self._needs_grad = needs_grad
        into = None if into is None else Gradients(None, None, *map(at_least_float32, into.parameters))
        # addmm accumulates in place; totals of another dtype (float32 for half precision) are added at the end.
        total = None if into is None else next(filter(torch.is_tensor, into.parameters), None)
        self._deferred_totals = into if total is not None and total.dtype != dy_SM.dtype else None
        self._accumulates, self._last_expert = into is not None and self._deferred_totals is None, -1
        if into is None or self._deferred_totals is not None:
            w1 = weights.w1.new_empty(weights.w1.shape) if needs_grad.w1 else None
            w2 = weights.w2.new_empty(weights.w2.shape) if needs_grad.w2 else None
            b1 = torch.zeros_like(weights.b1) if weights.b1 is not None and needs_grad.b1 else None
            b2 = torch.zeros_like(weights.b2) if weights.b2 is not None and needs_grad.b2 else None
            into = Gradients(None, None, w1, w2, b1, b2)
            for expert, count in enumerate(layout.counts):
                for matrix in (w1, w2) if count == 0 else ():
                    if matrix is not None:
                        matrix[expert].zero_()
        self._totals, self._layout, self._weights = into, layout, weights
        self._x_SM = x_SM.contiguous() if x_SM is not None and needs_grad.w1 else None
        self._factor_N1 = None if weight_N is None else weight_N.to(dy_SM.dtype)[:, None]
        self._dw1_E = () if into.w1 is None else into.w1.flatten(1, -2).unbind()
        self._dw2_E = () if into.w2 is None else into.w2.unbind()
        scaled = weight_N is not None
        x_rows = max_rows if needs_grad.w1 and (scaled or layout.source_N is not None) else 0
        self._x = dy_SM.new_empty((x_rows, weights.w1.shape[-1]))
        self._dy = dy_SM.new_empty(
            (max_rows if scaled and (needs_grad.w2 or needs_grad.b2) else 0, weights.w2.shape[1])
        )

    def add(self, block: _RowBlock, a: Tensor | None, dh: Tensor | None, dy: Tensor) -> None:
        factor = None if self._factor_N1 is None else block.of(self._factor_N1)
        needs_grad, db1, db2 = self._needs_grad, self._totals.b1, self._totals.b2
        # dW1 = (s·dH')ᵀ·x = dH'ᵀ·(s·x), dW2 = (s·dy)ᵀ·A
        if needs_grad.w1:
            assert self._x_SM is not None and dh is not None
            x = block.gather(self._x_SM, self._layout, self._x)
            if factor is not None:
                x = torch.mul(x, factor, out=self._x[: block.rows])
            self._add_products(block, self._dw1_E, dh, x)
        if factor is not None and (needs_grad.w2 or needs_grad.b2):
            dy = torch.mul(dy, factor, out=self._dy[: block.rows])
        if needs_grad.w2:
            assert a is not None
            self._add_products(block, self._dw2_E, dy, a)
        self._last_expert = block.experts[-1]
        if db1 is not None and dh is not None:
            for expert, dh_e in block.by_expert(dh if factor is None else dh * factor):
                db1[expert].add_(dh_e.sum(0).view(db1.shape[1:]))
        if db2 is not None:
            for expert, dy_e in block.by_expert(dy[:, self._weights.b2_columns()]):
                db2[expert].add_(dy_e.sum(0))

    def _add_products(self, block: _RowBlock, out_E: Sequence[Tensor], left: Tensor, right: Tensor) -> None:
        last = self._last_expert
        columns = left.t().split(block.sizes, 1)
        for (expert, right_e), left_e in zip(block.by_expert(right), columns, strict=True):
            # An expert's first block overwrites uninitialized memory; later blocks accumulate.
            if self._accumulates or expert == last:
                # PyTorch's FLOP counter does not count `addmm_`.
                torch.addmm(out_E[expert], left_e, right_e, out=out_E[expert])
            else:
                torch.mm(left_e, right_e, out=out_E[expert])
            last = expert

    def gradients(self, dx_SM: Tensor | None, dweight_N: Tensor | None) -> Gradients:
        if self._deferred_totals is None:
            return replace(self._totals, x_SM=dx_SM, weight_N=dweight_N)
        pairs = zip(self._deferred_totals.parameters, self._totals.parameters, strict=True)
        sums = (None if total is None or grad is None else total.add_(grad) for total, grad in pairs)
        return Gradients(dx_SM, dweight_N, *sums)


@dataclass
class _RowBlock:
    """Sorted rows from `start` on, processed together: `sizes[i]` rows of expert `experts[i]`."""

    start: int
    experts: list[int]
    sizes: list[int]
    rows: int

    def of(self, value_N: Tensor) -> Tensor:
        return value_N[self.start : self.start + self.rows]

    def gather(self, x_SM: Tensor, layout: Layout, buffer: Tensor) -> Tensor:
        """Gather the rows' tokens into the buffer, or return a view if they are already in order."""
        if layout.source_N is None:
            return self.of(x_SM)
        return torch.index_select(x_SM, 0, self.of(layout.source_N), out=buffer[: self.rows])

    def by_expert(self, *values: Tensor) -> Iterator[tuple[Any, ...]]:
        return zip(self.experts, *(value.split(self.sizes) for value in values), strict=True)


def row_blocks(layout: Layout, like: Tensor, hidden: int) -> tuple[list[_RowBlock], int, int]:
    """Split sorted rows into blocks, in expert order.

    Also return the row count of the largest block and the number of rows of width `hidden` that fit in cache.
    """
    step = rows_in_cache(hidden * like.itemsize, _SLICE_BYTES)
    batch_rows = min(step, rows_in_cache(like.shape[1] * like.itemsize, _SLICE_BYTES))
    max_rows = max(layout.counts, default=0)
    # In half precision a weight gradient must be one GEMM: accumulated blocks would be rounded after each.
    if like.dtype in (torch.float32, torch.float64):
        max_rows = min(max_rows, _BLOCK_ROWS)
    blocks: list[_RowBlock] = []
    start = 0
    for expert, count in enumerate(layout.counts):
        parts = -(-count // max_rows) if count else 0
        for i in range(parts):
            rows = count * (i + 1) // parts - count * i // parts
            if blocks and blocks[-1].rows + rows <= batch_rows:
                blocks[-1].experts.append(expert)
                blocks[-1].sizes.append(rows)
                blocks[-1].rows += rows
            else:
                blocks.append(_RowBlock(start, [expert], [rows], rows))
            start += rows
    return blocks, max((block.rows for block in blocks), default=0), step


def define_experts(x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: str) -> Tensor:
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
