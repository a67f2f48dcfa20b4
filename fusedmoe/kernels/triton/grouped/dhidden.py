"""Grouped GEMM of the hidden gradient, dA' = dy[source]·W2_e, with all its consumers as epilogue.

With A = act(H) recomputed and s the router weight of the row: dH = s·dA'·act'(H), s·A (for the gradient of W2), and the
router weight's gradient ⟨dA', A⟩, one partial sum per column tile. Outputs with a None pointer are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.experts import ALL, NeedsGrad, Weights
from fusedmoe.kernels.one_sided import Wait
from fusedmoe.kernels.triton.grouped.call import GroupedCall, aligned, constants, tensor_descriptor, wait_arguments
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import ACT_CODES, act_both, halves, mac, swizzle
from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.triton.one_sided.network import arrived
from fusedmoe.kernels.triton.one_sided.remote import wait

_PART = 32


@triton.jit
def _finish(da, s, h_ptr, dh_ptr, a_ptr, row, inside, column, H, ACT: tl.constexpr, GATED: tl.constexpr):
    """Store dH and s·A of a tile. `row`: row index of each of the tile's BM rows; `inside`: whether the row exists."""
    mask = inside[:, None] & (column < H)[None, :]
    if GATED:
        offset = row[:, None] * (2 * H) + column[None, :]
        g = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(h_ptr + offset + H, mask=mask, other=0.0).to(tl.float32)
        act, slope = act_both(g, ACT)
        a = act * u
        scaled = da * s[:, None]
        if dh_ptr is not None:
            tl.store(dh_ptr + offset, (scaled * u * slope).to(dh_ptr.dtype.element_ty), mask=mask)
            tl.store(dh_ptr + offset + H, (scaled * act).to(dh_ptr.dtype.element_ty), mask=mask)
    else:
        offset = row[:, None] * H + column[None, :]
        h = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        a, slope = act_both(h, ACT)
        if dh_ptr is not None:
            tl.store(dh_ptr + offset, (da * s[:, None] * slope).to(dh_ptr.dtype.element_ty), mask=mask)
    if a_ptr is not None:
        a_ptrs = a_ptr + row[:, None] * H + column[None, :]
        tl.store(a_ptrs, (a * s[:, None]).to(a_ptr.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask, da * a, 0.0), axis=1)


@triton.jit
def _finish_parts(
    da, s, h_ptr, dh_ptr, a_ptr, row, inside, first, H,
    ACT: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Run `_finish` on PART columns at a time: all at once would not fit the registers."""
    if WIDTH <= PART:
        column = first + tl.arange(0, WIDTH)
        return _finish(da, s, h_ptr, dh_ptr, a_ptr, row, inside, column, H, ACT, GATED)
    else:
        HALF: tl.constexpr = WIDTH // 2
        left, right = halves(da, BM, WIDTH)
        ds = _finish_parts(left, s, h_ptr, dh_ptr, a_ptr, row, inside, first, H, ACT, GATED, BM, HALF, PART)
        first += HALF
        return ds + _finish_parts(right, s, h_ptr, dh_ptr, a_ptr, row, inside, first, H, ACT, GATED, BM, HALF, PART)


@jit(do_not_specialize=["n_row_tiles", "rows", "limit_ns"])
def dhidden_kernel(
    dy_ptr, source_ptr, w2, weight_ptr, h_ptr,
    # Outputs: dH, s·A, and [column tiles, rows] partial sums of the router weights' gradients; each may be None.
    dh_ptr, a_ptr, ds_ptr,
    tiles_ptr, ends_ptr, n_row_tiles, rows, M, H,
    signals_ptr, epoch_ptr, stop_ptr, record_ptr, limit_ns,
    # WAIT_ROWS: rows per signal, 0 to wait for none.
    ACT: tl.constexpr, GATED: tl.constexpr, GATHER: tl.constexpr, WAIT_ROWS: tl.constexpr, NVSHMEM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row_tile, col_tile = swizzle(tl.program_id(0), n_row_tiles, tl.cdiv(H, BN), GROUP)
    expert = tl.load(tiles_ptr + 2 * row_tile)
    if expert < 0:
        return
    start = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(ends_ptr + expert)
    n0 = col_tile * BN

    row = start + tl.arange(0, BM)
    inside = row < end
    # Clamped, not masked: see `up_kernel`.
    row = tl.minimum(row, end - 1).to(tl.int64)
    source = tl.load(source_ptr + row) if GATHER else row
    if WAIT_ROWS > 0:
        epoch = tl.load(epoch_ptr)
        wait(signals_ptr, (source // WAIT_ROWS).to(tl.int32), inside, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
        if NVSHMEM:
            arrived(signals_ptr + tl.load(source_ptr + start) // WAIT_ROWS, epoch)
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
            # A clamp would hide that addresses are contiguous, hence the mask.
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
    ds = _finish_parts(acc, s, h_ptr, dh_ptr, a_ptr, row, inside, n0, H, ACT, GATED, BM, BN, PART)
    if ds_ptr is not None:
        tl.store(ds_ptr + col_tile.to(tl.int64) * rows + row, ds, mask=inside)


def dhidden(
    call: GroupedCall,
    dy_SM: Tensor,
    h: Tensor,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    needs_grad: NeedsGrad = ALL,
    wait: Wait | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the hidden layer: dH, s·A and ds, each None if no requested gradient needs it.

    dH [N, H], or [N, 2·H] if gated, is the gradient of the pre-activations. s·A [N, H] are the activations times the
    router weights s, from which dW2 is computed. ds [N] is the gradient of s, without the term of the output bias.
    """
    layout, dim, hidden = call.layout, dy_SM.shape[1], weights.w2.shape[2]
    dy_SM, h, w2 = aligned(dy_SM), aligned(h), aligned(weights.w2)
    gather = layout.source_N is not None
    variant = call.variant("dhidden", dim, hidden, activation.name, gather, weight_N is not None)

    def launch(config: Config) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dh = torch.empty_like(h) if needs_grad.dh_NH else None
        a = h.new_empty((layout.rows, hidden)) if needs_grad.w2 else None
        column_tiles = triton.cdiv(hidden, config.bn)
        ds = None
        if weight_N is not None and needs_grad.weight_N:
            ds = torch.empty((column_tiles, layout.rows), device=h.device, dtype=torch.float32)
        if isinstance(config, HopperConfig):
            from fusedmoe.kernels.gluon.grouped.launch import launch_dhidden

            assert wait is None, "calls that wait are not tuned, and the Gluon form is no one's default"
            launch_dhidden(call, config, dy_SM, h, weight_N, w2, dh, a, ds, activation)
            return dh, a, None if ds is None else ds.sum(0)
        tiles = call.tiles(config.bm, wait)
        dhidden_kernel[(len(tiles.table) * column_tiles,)](
            dy_SM, layout.source_N, tensor_descriptor(w2, [1, config.bk, config.bn]) if variant.bulk else w2,
            weight_N, h, dh, a, ds,
            tiles.table, call.ends_E, len(tiles.table), layout.rows, dim, hidden,
            ACT=ACT_CODES[activation.name], GATED=activation.gated,
            **wait_arguments(wait),
            GATHER=gather, WEIGHTED=variant.extra, PART=min(_PART, config.bn // 4), **constants(variant, config),
        )  # fmt: skip
        return dh, a, None if ds is None else ds.sum(0)

    return call.run(variant, dim, hidden, launch)
