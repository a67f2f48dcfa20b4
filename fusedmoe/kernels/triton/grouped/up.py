"""Grouped GEMM of the up projection, h = x[source]·W1_eᵀ + b1_e and a = act(h), with gathered inputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.one_sided import Wait
from fusedmoe.kernels.triton.grouped.call import GroupedCall, aligned, constants, tensor_descriptor, wait_arguments
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import ACT_CODES, act_forward, halves, mac, swizzle
from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.triton.one_sided.network import arrived
from fusedmoe.kernels.triton.one_sided.remote import wait


@triton.jit
def _finish_gated(g, u, b1_ptr, h_ptr, a_ptr, expert, row, inside, column, H, ACT: tl.constexpr, BIAS: tl.constexpr):
    mask = inside[:, None] & (column < H)[None, :]
    if BIAS:
        bias_ptrs = b1_ptr + expert * 2 * H + column
        g += tl.load(bias_ptrs, mask=column < H, other=0.0).to(tl.float32)[None, :]
        u += tl.load(bias_ptrs + H, mask=column < H, other=0.0).to(tl.float32)[None, :]
    h_ptrs = h_ptr + row[:, None] * (2 * H) + column[None, :]
    tl.store(h_ptrs, g.to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptrs + H, u.to(h_ptr.dtype.element_ty), mask=mask)
    a = act_forward(g, ACT) * u
    tl.store(a_ptr + row[:, None] * H + column[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish_plain(h, b1_ptr, h_ptr, a_ptr, expert, row, inside, column, H, ACT: tl.constexpr, BIAS: tl.constexpr):
    mask = inside[:, None] & (column < H)[None, :]
    if BIAS:
        h += tl.load(b1_ptr + expert * H + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * H + column[None, :]
    tl.store(h_ptr + offset, h.to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(a_ptr + offset, act_forward(h, ACT).to(a_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n_row_tiles", "limit_ns"])
def up_kernel(
    x_ptr, source_ptr, w1, b1_ptr, h_ptr, a_ptr,
    tiles_ptr, ends_ptr, n_row_tiles, M, H,
    signals_ptr, epoch_ptr, stop_ptr, record_ptr, limit_ns,
    # WAIT_ROWS: rows per signal, 0 to wait for none.
    ACT: tl.constexpr, GATED: tl.constexpr, GATHER: tl.constexpr, WAIT_ROWS: tl.constexpr, NVSHMEM: tl.constexpr,
    BIAS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Of the tile's BN columns, a gated activation has BH in each half.
    NUM_PROJECTIONS: tl.constexpr = 2 if GATED else 1
    BH: tl.constexpr = BN // NUM_PROJECTIONS
    row_tile, col_tile = swizzle(tl.program_id(0), n_row_tiles, tl.cdiv(H, BH), GROUP)
    expert = tl.load(tiles_ptr + 2 * row_tile)
    # The grid is an upper bound; unused tiles have no expert.
    if expert < 0:
        return
    start = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(ends_ptr + expert)
    h0 = col_tile * BH

    row = start + tl.arange(0, BM)
    inside = row < end
    # Clamped, because a masked operand could not be copied to the tensor cores directly.
    row = tl.minimum(row, end - 1).to(tl.int64)
    source = tl.load(source_ptr + row) if GATHER else row
    # A tile waits only for the signals of the buffer tiles that hold its rows.
    if WAIT_ROWS > 0:
        epoch = tl.load(epoch_ptr)
        wait(signals_ptr, (source // WAIT_ROWS).to(tl.int32), inside, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
        if NVSHMEM:
            arrived(signals_ptr + tl.load(source_ptr + start) // WAIT_ROWS, epoch)
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + source[:, None] * M + k[None, :]
    if not DESCRIPTORS:
        n = tl.arange(0, BN)
        column = h0 + n % BH
        # Row n of the tile is row n % BH of half n // BH, so a tile has both halves for the activation. Columns past H
        # are clamped, and not stored.
        weight_row = (expert.to(tl.int64) * NUM_PROJECTIONS + n // BH) * H + tl.minimum(column, H - 1)
        w_ptrs = w1 + weight_row[:, None] * M + k[None, :]

    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, M, BK):
        if EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=k[None, :] < M - k0, other=0.0)
        if DESCRIPTORS:
            if GATED:
                w = w1.load([expert * 2, h0, k0]).reshape(BN, BK)
            else:
                w = w1.load([expert, h0, k0]).reshape(BN, BK)
        else:
            if EVEN_K:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=k[None, :] < M - k0, other=0.0)
            w_ptrs += BK
        x_ptrs += BK
        acc = mac(x, w.T, acc, PRECISION, INTERPRET)

    # All columns at once would not fit the registers.
    left, right = halves(acc, BM, BN)
    if GATED:
        g_left, g_right = halves(left, BM, BH)
        u_left, u_right = halves(right, BM, BH)
        column = h0 + tl.arange(0, BH // 2)
        _finish_gated(g_left, u_left, b1_ptr, h_ptr, a_ptr, expert, row, inside, column, H, ACT, BIAS)
        _finish_gated(g_right, u_right, b1_ptr, h_ptr, a_ptr, expert, row, inside, column + BH // 2, H, ACT, BIAS)
    else:
        for half in tl.static_range(2):
            h = left if half == 0 else right
            if BN < 256:
                column = h0 + half * (BH // 2) + tl.arange(0, BH // 2)
                _finish_plain(h, b1_ptr, h_ptr, a_ptr, expert, row, inside, column, H, ACT, BIAS)
            else:
                h_left, h_right = halves(h, BM, BH // 2)
                for quarter in tl.static_range(2):
                    h_first, h_second = halves(h_left if quarter == 0 else h_right, BM, BH // 4)
                    column = h0 + half * (BH // 2) + quarter * (BH // 4) + tl.arange(0, BH // 8)
                    _finish_plain(h_first, b1_ptr, h_ptr, a_ptr, expert, row, inside, column, H, ACT, BIAS)
                    _finish_plain(h_second, b1_ptr, h_ptr, a_ptr, expert, row, inside, column + BH // 8, H, ACT, BIAS)


def up(
    call: GroupedCall, x_SM: Tensor, weights: Weights, activation: Activation, wait: Wait | None = None
) -> tuple[Tensor, Tensor]:
    layout, hidden, dim = call.layout, weights.w2.shape[2], x_SM.shape[1]
    x_SM, w1 = aligned(x_SM), aligned(weights.w1)
    gather = layout.source_N is not None
    variant = call.variant("up", dim, hidden, activation.name, gather, weights.b1 is not None)

    def launch(config: Config) -> tuple[Tensor, Tensor]:
        h = x_SM.new_empty((layout.rows, activation.num_projections * hidden))
        a = x_SM.new_empty((layout.rows, hidden))
        if isinstance(config, HopperConfig):
            from fusedmoe.kernels.gluon.grouped.launch import launch_up

            assert wait is None, "calls that wait are not tuned, and the Gluon form is no one's default"
            launch_up(call, config, x_SM, w1, weights.b1, h, a, activation)
            return h, a
        columns = config.bn // activation.num_projections
        box = [activation.num_projections, columns, config.bk]
        tiles = call.tiles(config.bm, wait)
        up_kernel[(len(tiles.table) * triton.cdiv(hidden, columns),)](
            x_SM, layout.source_N, tensor_descriptor(w1.view(-1, hidden, dim), box) if variant.bulk else w1,
            weights.b1, h, a, tiles.table, call.ends_E, len(tiles.table), dim, hidden,
            ACT=ACT_CODES[activation.name], GATED=activation.gated,
            **wait_arguments(wait),
            GATHER=gather, BIAS=variant.extra, **constants(variant, config),
        )  # fmt: skip
        return h, a

    return call.run(variant, dim, hidden, launch)
