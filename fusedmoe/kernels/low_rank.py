"""Experts with low-rank adapters: `kernels/experts.py` with W_e + scale·B_e·A_e in place of the frozen W_e.

Neither the sum nor B·A is materialized. For a row x, with A [r, in] and B [out, r], h = x·Wᵀ + scale·(x·Aᵀ)·Bᵀ. The
gradients, with t = dh·B, use tensors of width r:

    dx = dh·W + scale·t·A             dA = scale·tᵀ·x             dB = scale·dhᵀ·(x·Aᵀ)

Router weights are applied to tensors of width r, and when rows are summed to dx_SM. Plain PyTorch processes rows in
blocks and materializes stored (for example quantized) weights expert by expert. Triton uses grouped GEMMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.backend import has_kernels
from fusedmoe.kernels.experts import RowGradients, Weights, define_experts, forward_blocks
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.grouped import grouped_dweight, grouped_product
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.needs_grad import NeedsGrad


class LowRank(NamedTuple):
    """Low-rank adapter of one matrix [out, in] per expert; adds scale·B·A to it.

    Attributes:
        a_ErI: [e, r, in].
        b_EOr: [e, out, r]; out includes both halves of a gated first GEMM.
        scale: LoRA's alpha / r.
    """

    a_ErI: Tensor
    b_EOr: Tensor
    scale: float = 1.0

    def contiguous(self) -> LowRank:
        return LowRank(self.a_ErI.contiguous(), self.b_EOr.contiguous(), self.scale)

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.a_ErI.to(dtype), self.b_EOr.to(dtype), self.scale)

    def delta_EOI(self) -> Tensor:
        return self.scale * (self.b_EOr @ self.a_ErI)

    @classmethod
    def joined(cls, adapters: list[LowRank]) -> LowRank:
        if len(adapters) == 1:
            return adapters[0]
        a = torch.cat([adapter.a_ErI for adapter in adapters], 1)
        return cls(a, torch.cat([adapter.scale * adapter.b_EOr for adapter in adapters], 2))


class Adapters(NamedTuple):
    """Adapters of both GEMMs; None for a GEMM without an adapter."""

    up: LowRank | None
    down: LowRank | None

    def contiguous(self) -> Adapters:
        return Adapters(*(None if adapter is None else adapter.contiguous() for adapter in self))


class StoredMatrices(Protocol):
    """Stored (quantized) expert matrices [e, out, in]; each is materialized, in the rows' dtype, for its expert."""

    shape: Sequence[int]

    def __getitem__(self, expert: int) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """Frozen parameters of the local experts, materialized one expert at a time.

    Attributes:
        up: [e, 2·H, M] for a gated activation (first half g, second u), else [e, H, M].
        down: [e, M, H].
        b1, b2: [e, 2·H] or [e, H], and [e, M]; each may be None.
    """

    up: StoredMatrices
    down: StoredMatrices
    b1: Tensor | None = None
    b2: Tensor | None = None

    def b2_columns(self) -> slice:
        return slice(None)

    def matrices(self, transposed: bool = False) -> tuple[Any, Any, tuple[int, int, int]]:
        sizes = self.up.shape[2], self.down.shape[1], self.down.shape[2]
        return (_Transposed(self.up), _Transposed(self.down), sizes) if transposed else (self.up, self.down, sizes)


@dataclass(frozen=True)
class _Transposed:
    matrices: StoredMatrices

    def __getitem__(self, expert: int) -> Tensor:
        return self.matrices[expert].t()


# Gradients of A and B of the up adapter, then of the down adapter; None without an adapter or if not requested.
FactorGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def low_rank_forward(
    x_SM: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights | StoredWeights,
    adapters: Adapters,
    activation: Activation,
) -> tuple[Tensor, Tensor]:
    """Compute y_SM, and hidden_NL to save for backward. All parameters are contiguous.

    A row of hidden_NL has the pre-activation and the low-rank products x·Aᵀ of both adapters, L columns in all.
    """
    if isinstance(weights, Weights) and has_kernels(x_SM):
        return _forward_grouped(x_SM, layout, weight_N, weights, adapters, activation)
    down = weights.down if isinstance(weights, StoredWeights) else weights.w2
    width = activation.num_projections * down.shape[2] + sum(_ranks(adapters))
    hidden_NL = x_SM.new_empty((layout.rows, width))
    h_NH, *low = _parts(hidden_NL, adapters)
    forward_adapters = [
        None if adapter is None else _ForwardAdapter(adapter, low_Nr)
        for adapter, low_Nr in zip(adapters, low, strict=True)
    ]
    return forward_blocks(x_SM, layout, weight_N, weights, activation, h_NH, forward_adapters), hidden_NL


def low_rank_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    hidden_NL: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights | StoredWeights,
    adapters: Adapters,
    activation: Activation,
    needs_factor_grads: bool,
    needs_dx: bool = True,
) -> tuple[Tensor | None, Tensor | None, FactorGradients]:
    """Compute gradients of x_SM, weight_N (zero in padding rows), and, if `needs_factor_grads`, of the factors."""
    if isinstance(weights, Weights) and has_kernels(x_SM):
        given = dy_SM, x_SM, hidden_NL, layout, weight_N, weights, adapters, activation, needs_factor_grads
        return _backward_grouped(*given, needs_dx)
    x_SM = x_SM.contiguous()
    h_NH, *low = _parts(hidden_NL, adapters)
    up, down = (
        None if adapter is None else _FactorGradientSums(adapter, low_Nr, weight_N, needs_factor_grads)
        for adapter, low_Nr in zip(adapters, low, strict=True)
    )
    needs_grad = NeedsGrad(x_SM=needs_dx)
    rows = RowGradients(dy_SM, h_NH, layout, weight_N, weights, activation, needs_grad, (up, down))
    x_buffer, a_buffer, dh_buffer = (
        x_SM.new_empty((rows.max_rows, width)) for width in (x_SM.shape[1], rows.hidden, rows.width)
    )
    for block in rows.blocks:
        a, dh = a_buffer[: block.rows], dh_buffer[: block.rows]
        dy = rows.add(block, a, dh)
        if needs_factor_grads and down is not None:
            down.add_gradients(block, a, dy)
        if needs_factor_grads and up is not None:  # the tokens are read only here
            up.add_gradients(block, block.gather(x_SM, layout, x_buffer), dh)
    grads = [(None, None) if sums is None else (sums.da, sums.db) for sums in (up, down)]
    return rows.dx_SM(), rows.dweight_N, (*grads[0], *grads[1])


def _ranks(adapters: Adapters) -> list[int]:
    return [0 if adapter is None else adapter.a_ErI.shape[1] for adapter in adapters]


def _parts(hidden_NL: Tensor, adapters: Adapters) -> tuple[Tensor, ...]:
    """Split hidden_NL by columns: the pre-activation, then x·Aᵀ of the up and the down adapter."""
    ranks = _ranks(adapters)
    return hidden_NL.split([hidden_NL.shape[1] - sum(ranks), *ranks], 1)


class _ForwardAdapter:
    """Adapter of one GEMM in forward, with per-expert views of its transposed factors."""

    def __init__(self, adapter: LowRank, low_Nr: Tensor) -> None:
        self._low_Nr, self._scale = low_Nr, adapter.scale
        self._a_E, self._b_E = adapter.a_ErI.mT.unbind(), adapter.b_EOr.mT.unbind()

    def add(self, block: Any, x: Tensor, out: Tensor) -> None:
        """Write x·Aᵀ of a block's rows to `low_Nr`, and add scale·(x·Aᵀ)·Bᵀ to `out`."""
        for expert, x_e, low_e, out_e in block.by_expert(x, block.of(self._low_Nr), out):
            torch.mm(x_e, self._a_E[expert], out=low_e)
            torch.addmm(out_e, low_e, self._b_E[expert], alpha=self._scale, out=out_e)


class _FactorGradientSums:
    """Adapter of one GEMM in backward, and the gradients of its factors, None unless they are trained."""

    def __init__(self, adapter: LowRank, low_Nr: Tensor, weight_N: Tensor | None, needs_grad: bool) -> None:
        self._low_Nr, self._scale, self._needs_grad = low_Nr, adapter.scale, needs_grad
        self._a_E, self._b_E = adapter.a_ErI.unbind(), adapter.b_EOr.unbind()
        self._factor_N1 = None if weight_N is None else (weight_N.to(low_Nr.dtype) * adapter.scale)[:, None]
        self.da = self.db = None
        if needs_grad:
            # Zeros for experts without rows; experts with many rows accumulate blocks.
            self.da, self.db = torch.zeros_like(adapter.a_ErI), torch.zeros_like(adapter.b_EOr)
            self._da_E, self._db_E = self.da.unbind(), self.db.unbind()

    def add_input_gradient(self, block: Any, dout: Tensor, din: Tensor | None) -> None:
        """Compute dout·B of a block's rows, and add scale·(dout·B)·A to `din`, if given."""
        if din is None and not self._needs_grad:
            return
        self._t = dout.new_empty((block.rows, self._low_Nr.shape[1]))
        for expert, dout_e, t_e in block.by_expert(dout, self._t):
            torch.mm(dout_e, self._b_E[expert], out=t_e)
        if din is not None:
            for expert, t_e, din_e in block.by_expert(self._t, din):
                torch.addmm(din_e, t_e, self._a_E[expert], alpha=self._scale, out=din_e)

    def add_gradients(self, block: Any, x: Tensor, dout: Tensor) -> None:
        """Accumulate the factor gradients of one block, after `add_input_gradient` has computed its dout·B."""
        factor = self._scale if self._factor_N1 is None else block.of(self._factor_N1)
        t, low = self._t.mul_(factor), block.of(self._low_Nr) * factor
        columns = zip(t.t().split(block.sizes, 1), dout.t().split(block.sizes, 1), strict=True)
        for (expert, x_e, low_e), (t_e, dout_e) in zip(block.by_expert(x, low), columns, strict=True):
            torch.addmm(self._da_E[expert], t_e, x_e, out=self._da_E[expert])
            torch.addmm(self._db_E[expert], dout_e, low_e, out=self._db_E[expert])


def low_rank_product(
    rows_NK: Tensor, weight: Tensor, bias_EO: Tensor | None, adapter: LowRank | None, layout: Layout, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Compute [N, O] = rows·Wᵀ + bias + scale·(rows·Aᵀ)·Bᵀ, and rows·Aᵀ, [N, r]; zeros in padding rows.

    `weight` is [E, O, K] if transposed, else [E, K, O]; the factors are [E, r, K] and [E, O, r] in both cases.
    """
    out_NO = grouped_product(rows_NK, weight, bias_EO, layout, transposed)
    if adapter is None:
        return out_NO, rows_NK.new_empty((layout.rows, 0))
    low_Nr = grouped_product(rows_NK, adapter.a_ErI, None, layout, True)
    return out_NO.add_(grouped_product(low_Nr, adapter.b_EOr, None, layout, True), alpha=adapter.scale), low_Nr


def low_rank_input_gradient(
    dout_NO: Tensor, weight: Tensor, adapter: LowRank | None, layout: Layout, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows' gradient of `low_rank_product`, and scale·dout·B, [N, r], for the gradient of A."""
    drows_NK = grouped_product(dout_NO, weight, None, layout, not transposed)
    t_Nr = _scaled_dout_b(dout_NO, adapter, layout)
    if adapter is not None:
        drows_NK.add_(grouped_product(t_Nr, adapter.a_ErI, None, layout, False))
    return drows_NK, t_Nr


def _scaled_dout_b(dout_NO: Tensor, adapter: LowRank | None, layout: Layout) -> Tensor:
    if adapter is None:
        return dout_NO.new_empty((layout.rows, 0))
    return grouped_product(dout_NO, adapter.b_EOr, None, layout, False).mul_(adapter.scale)


def low_rank_factor_gradients(
    t_Nr: Tensor, rows_NK: Tensor, dout_NO: Tensor, low_Nr: Tensor, scale: float, layout: Layout
) -> tuple[Tensor, Tensor]:
    return grouped_dweight(t_Nr, rows_NK, layout), grouped_dweight(dout_NO, low_Nr * scale, layout)


def _forward_grouped(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, adapters: Adapters, activation: Activation
) -> tuple[Tensor, Tensor]:
    b1 = None if weights.b1 is None else weights.b1.flatten(1)
    rows_NM = permute(x_SM, layout)
    h_NH, up_low_Nr = low_rank_product(rows_NM, weights.w1.flatten(1, -2), b1, adapters.up, layout, True)
    a_NH = x_SM.new_empty((layout.rows, weights.w2.shape[2]))
    activation.apply(h_NH, a_NH)
    out_NM, down_low_Nr = low_rank_product(a_NH, weights.w2, _full_bias(weights), adapters.down, layout, True)
    return gather_sum(out_NM, layout, weight_N), torch.cat((h_NH, up_low_Nr, down_low_Nr), 1)


def _backward_grouped(
    dy_SM: Tensor,
    x_SM: Tensor,
    hidden_NL: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    adapters: Adapters,
    activation: Activation,
    needs_factor_grads: bool,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor | None, FactorGradients]:
    h_NH, up_low_Nr, down_low_Nr = _parts(hidden_NL, adapters)
    # Results have zero padding rows, which activations keep.
    dout_NM = permute(dy_SM, layout)
    da_NH, down_t = low_rank_input_gradient(dout_NM, weights.w2, adapters.down, layout, True)
    a_NH, act_NH, dh_NH = (like.new_empty(like.shape) for like in (da_NH, da_NH, h_NH))
    activation.apply_backward(h_NH, da_NH, a_NH, dh_NH, act_NH)
    dweight_N = None
    if weight_N is not None:
        dweight_N = torch.mul(da_NH, a_NH, out=act_NH).sum(1)
        if (bias := _full_bias(weights)) is not None:
            dweight_N += grouped_product(dout_NM, bias[:, None], None, layout, True)[:, 0]
    dx_SM = None
    if needs_dx:
        dx_NM, up_t = low_rank_input_gradient(dh_NH, weights.w1.flatten(1, -2), adapters.up, layout, True)
        dx_SM = gather_sum(dx_NM, layout, weight_N)
    else:
        up_t = _scaled_dout_b(dh_NH, adapters.up, layout)
    up_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    down_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    factor = 1.0 if weight_N is None else weight_N.to(x_SM.dtype)[:, None]
    if needs_factor_grads and adapters.up is not None:
        given = (up_t * factor, permute(x_SM, layout), dh_NH, up_low_Nr * factor)
        up_grads = low_rank_factor_gradients(*given, adapters.up.scale, layout)
    if needs_factor_grads and adapters.down is not None:
        given = (down_t * factor, a_NH, dout_NM, down_low_Nr * factor)
        down_grads = low_rank_factor_gradients(*given, adapters.down.scale, layout)
    return dx_SM, dweight_N, (*up_grads, *down_grads)


def _full_bias(weights: Weights) -> Tensor | None:
    if weights.b2 is None:
        return None
    columns = weights.b2_columns()
    return torch.nn.functional.pad(weights.b2, (columns.start, weights.w2.shape[1] - columns.stop))


def define_low_rank_experts(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, adapters: Adapters, activation: str
) -> Tensor:
    """Reference, differentiable, with materialized W + scale·B·A."""
    sums = (
        w if adapter is None else w + adapter.delta_EOI().view(w.shape)
        for w, adapter in zip((weights.w1, weights.w2), adapters, strict=True)
    )
    w1, w2 = sums
    return define_experts(x_SM, layout, weight_N, replace(weights, w1=w1, w2=w2), activation)
