"""Gradient of the hidden rows: dA' = dy[source]·W2_e, and from it, while it is in registers, everything that needs it.

With A = act(H) recomputed and s the router weight of the row: dH = s·dA'·act'(H), s·A (for the gradient of W2), and
the router weight's gradient ⟨dA', A⟩, one partial sum for each column tile. Definition: `define_dhidden`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.activation import define_activation
from fusedmoe.kernels.grouped.device import act_both, halves, mac, swizzle
from fusedmoe.kernels.grouped.product import define_product
from fusedmoe.kernels.jit import jit
from fusedmoe.kernels.nvshmem import arrived
from fusedmoe.kernels.remote import wait


@triton.jit
def _finish(
    da,
    s,
    h_ptr,
    dh_ptr,
    a_ptr,
    row,
    inside,
    column,
    H,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Stores dH and s·A for some columns of a tile and returns their part of ⟨dA', A⟩."""
    mask = inside[:, None] & (column < H)[None, :]
    if GATED:
        offset = row[:, None] * (2 * H) + column[None, :]
        g = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(h_ptr + offset + H, mask=mask, other=0.0).to(tl.float32)
        act, slope = act_both(g, ACT)
        a = act * u
        scaled = da * s[:, None]
        tl.store(dh_ptr + offset, (scaled * u * slope).to(dh_ptr.dtype.element_ty), mask=mask)
        tl.store(dh_ptr + offset + H, (scaled * act).to(dh_ptr.dtype.element_ty), mask=mask)
    else:
        offset = row[:, None] * H + column[None, :]
        h = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        a, slope = act_both(h, ACT)
        tl.store(dh_ptr + offset, (da * s[:, None] * slope).to(dh_ptr.dtype.element_ty), mask=mask)
    a_ptrs = a_ptr + row[:, None] * H + column[None, :]
    tl.store(a_ptrs, (a * s[:, None]).to(a_ptr.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask, da * a, 0.0), axis=1)


@jit(do_not_specialize=["n_row_tiles", "rows", "epoch", "limit_ns"])
def dhidden_kernel(
    dy_ptr,
    source_ptr,
    w2,
    weight_ptr,
    h_ptr,
    dh_ptr,
    a_ptr,
    ds_ptr,
    tiles_ptr,
    ends_ptr,
    n_row_tiles,
    rows,
    M,
    H,
    signals_ptr,
    stop_ptr,
    record_ptr,
    epoch,
    limit_ns,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    AWAITED: tl.constexpr,
    NVSHMEM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tile, col_tile = swizzle(tl.program_id(0), n_row_tiles, tl.cdiv(H, BN), GROUP)
    expert = tl.load(tiles_ptr + 2 * row_tile)
    if expert < 0:
        return
    start = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(ends_ptr + expert)
    n0 = col_tile * BN

    row = start + tl.arange(0, BM)
    inside = row < end
    row = tl.minimum(row, end - 1).to(tl.int64)
    source = tl.load(source_ptr + row) if GATHER else row
    if AWAITED > 0:
        wait(signals_ptr, (source // AWAITED).to(tl.int32), inside, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
        if NVSHMEM:
            arrived(signals_ptr + tl.load(source_ptr + start) // AWAITED, epoch)
    k = tl.arange(0, BK)
    dy_ptrs = dy_ptr + source[:, None] * M + k[None, :]
    if not DESCRIPTORS:
        n = n0 + tl.arange(0, BN)
        w_ptrs = w2 + expert.to(tl.int64) * M * H + k[:, None].to(tl.int64) * H + n[None, :]

    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, M, BK):
        if EVEN_K:
            dy = tl.load(dy_ptrs)
        else:
            dy = tl.load(dy_ptrs, mask=k[None, :] < M - k0, other=0.0)
        if DESCRIPTORS:
            w = w2.load([expert, k0, n0]).reshape(BK, BN)
        else:
            # Masked along the contiguous dimension, not clamped: a clamp would hide that addresses are contiguous.
            if EVEN_K:
                w = tl.load(w_ptrs, mask=(n < H)[None, :], other=0.0)
            else:
                w = tl.load(w_ptrs, mask=(k[:, None] < M - k0) & (n < H)[None, :], other=0.0)
            w_ptrs += BK * H
        dy_ptrs += BK
        acc = mac(dy, w, acc, PRECISION, INTERPRET)

    if WEIGHTED:
        s = tl.load(weight_ptr + row).to(tl.float32)
    else:
        s = tl.full((BM,), 1.0, dtype=tl.float32)
    # A quarter of the columns at a time: all at once would not fit the registers.
    left, right = halves(acc, BM, BN)
    ds = tl.zeros((BM,), dtype=tl.float32)
    for half in tl.static_range(2):
        da_left, da_right = halves(left if half == 0 else right, BM, BN // 2)
        column = n0 + half * (BN // 2) + tl.arange(0, BN // 4)
        ds += _finish(da_left, s, h_ptr, dh_ptr, a_ptr, row, inside, column, H, ACT, GATED)
        ds += _finish(da_right, s, h_ptr, dh_ptr, a_ptr, row, inside, column + BN // 4, H, ACT, GATED)
    if WEIGHTED:
        tl.store(ds_ptr + col_tile.to(tl.int64) * rows + row, ds, mask=inside)


def define_dhidden(
    dy_SM: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    h: Tensor,
    w2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dH, s·A and the router weights' gradient, in plain torch."""
    h = h.detach().requires_grad_()
    with torch.enable_grad():
        a = define_activation(activation, h)
    da = define_product(dy_SM[source_N], expert_N, w2, False)
    (dh,) = torch.autograd.grad(a, h, da * weight_N[:, None])
    return dh, a.detach() * weight_N[:, None], (da * a.detach()).sum(-1)
