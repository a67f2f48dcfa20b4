"""A product of rows with their expert's matrix: out[n] = a[n]·B_e (+ bias). The down projection and the rows' gradient.

B_e is stored [K, N] (`dX = dH·W1`) or transposed, [N, K] (`Y = A·W2ᵀ`).

Results may go straight to other ranks (`PUT`). Those for far peers (`NVSHMEM`) are stored in staging by the same code,
the columns of a row by several programs; the last of them to finish with a row tile has its rows put as wholes, in as
few puts as it can, while other tiles are still computed. What one program has of a row is some hundred bytes, for which
a put would cost more than it carries.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.one_sided import Put
from fusedmoe.kernels.triton.grouped.call import GroupedCall, constants, described, putting, solid
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import halves, mac, swizzle
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import put_runs
from fusedmoe.kernels.triton.one_sided.put import finish, signal_peers, signal_those_without


@triton.jit
def _put(part, weight, target, inside, column, N, WEIGHTED: tl.constexpr):
    """Some columns of a tile straight to the ranks that asked, rounded as a result and once more times its weight, as
    results are that are weighted when they are summed."""
    dtype: tl.constexpr = target.dtype.element_ty
    out = part.to(dtype)
    if WEIGHTED:
        out = (out.to(tl.float32) * weight[:, None]).to(dtype)
    tl.store(target[:, None] + column[None, :], out, mask=inside[:, None] & (column < N)[None, :])


@jit(do_not_specialize=["n_row_tiles", "bias_start", "bias_columns"])
def product_kernel(
    # Rows and all experts' matrices, or descriptors of them; the output bias; where results go.
    a, b, bias_ptr, out_ptr,
    # Row tiles (`make_tiles`), where each expert's rows end, and sizes.
    tiles_ptr, ends_ptr, n_row_tiles, K, N, bias_start, bias_columns,
    # Rows that are put elsewhere: addresses, weights, peers, and how peers learn that all of theirs are there.
    address_ptr, weight_ptr, peer_ptr, counter_ptr, wanted_ptr, signal_ptr,
    # For far peers: finished tiles of each row tile, addresses at the peer, numbers of peers to NVSHMEM.
    done_ptr, target_ptr, pe_ptr, epoch_ptr, W,
    # What is computed.
    TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PUT: tl.constexpr, NVSHMEM: tl.constexpr, WEIGHTED: tl.constexpr,
    # In which way, and in which tiles (`configs.py`).
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Which tile: programs of a band share rows of B in the L2 cache.
    row_tile, col_tile = swizzle(tl.program_id(0), n_row_tiles, tl.cdiv(N, BN), GROUP)
    if PUT:
        # A rank that gets no row from here would wait for ever: one program signals it before the work begins.
        if tl.program_id(0) == 0:
            signal_those_without(wanted_ptr, signal_ptr, tl.load(epoch_ptr), W)
    expert = tl.load(tiles_ptr + 2 * row_tile)
    # The grid is a bound on the tiles. Those beyond have no expert.
    if expert < 0:
        return
    start = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(ends_ptr + expert)
    n0 = col_tile * BN

    row = start + tl.arange(0, BM)
    inside = row < end
    # Rows past the end are clamped, not masked: a masked operand could not go from memory to the tensor cores
    # directly. Row times width passes 2³¹, hence 64 bits.
    row = tl.minimum(row, end - 1).to(tl.int64)
    n = n0 + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if not DESCRIPTORS:
        a_ptrs = a + row[:, None] * K + k[None, :]
        first = b + expert.to(tl.int64) * K * N
        if TRANSPOSED:
            b_ptrs = first + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
        else:
            b_ptrs = first + k[:, None].to(tl.int64) * N + n[None, :]

    # Main loop: a step is BK of the depth.
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        if DESCRIPTORS:
            # A tile's box may run into the next expert's rows, whose results are not stored.
            a_tile = a.load([start, k0])
            if TRANSPOSED:
                b_tile = b.load([expert, n0, k0]).reshape(BN, BK).T
            else:
                b_tile = b.load([expert, k0, n0]).reshape(BK, BN)
        else:
            if EVEN_K:
                a_tile = tl.load(a_ptrs)
            else:
                a_tile = tl.load(a_ptrs, mask=k[None, :] < K - k0, other=0.0)
            if TRANSPOSED:
                if EVEN_K:
                    b_tile = tl.load(b_ptrs).T
                else:
                    b_tile = tl.load(b_ptrs, mask=k[None, :] < K - k0, other=0.0).T
                b_ptrs += BK
            else:
                # Masked along the contiguous dimension, not clamped: a clamp would hide that addresses are contiguous.
                if EVEN_K:
                    b_tile = tl.load(b_ptrs, mask=(n < N)[None, :], other=0.0)
                else:
                    b_tile = tl.load(b_ptrs, mask=(k[:, None] < K - k0) & (n < N)[None, :], other=0.0)
                b_ptrs += BK * N
            a_ptrs += BK
        acc = mac(a_tile, b_tile, acc, PRECISION, INTERPRET)

    # Epilogue. The bias has columns of its own: a shard of the experts owns a part of them.
    if BIAS:
        of_bias = (n >= bias_start) & (n < bias_start + bias_columns)
        bias = tl.load(bias_ptr + expert * bias_columns + n - bias_start, mask=of_bias, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if PUT:
        if WEIGHTED:
            weight = tl.load(weight_ptr + row).to(tl.float32)
        else:
            weight = tl.full((BM,), 1.0, dtype=tl.float32)
        # Some columns at a time: addresses of all would not fit the registers.
        target = tl.load(address_ptr + row).to(out_ptr.dtype)
        left, right = halves(acc, BM, BN)
        for half in tl.static_range(2):
            first, second = halves(left if half == 0 else right, BM, BN // 2)
            for quarter in tl.static_range(2):
                part = first if quarter == 0 else second
                left_column = n0 + half * (BN // 2) + quarter * (BN // 4)
                if BN < 256:
                    _put(part, weight, target, inside, left_column + tl.arange(0, BN // 4), N, WEIGHTED)
                else:
                    one, other = halves(part, BM, BN // 4)
                    column = left_column + tl.arange(0, BN // 8)
                    _put(one, weight, target, inside, column, N, WEIGHTED)
                    _put(other, weight, target, inside, column + BN // 8, N, WEIGHTED)
        if NVSHMEM:
            tl.debug_barrier()
            before = tl.atomic_add(done_ptr + row_tile, 1, sem="acq_rel", scope="gpu")
            if before + 1 == tl.cdiv(N, BN):
                size = N * (out_ptr.dtype.element_ty.primitive_bitwidth // 8)
                put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, start, end - start, size, BM)
        peer = tl.load(peer_ptr + row)
        parts, epoch = tl.cdiv(N, BN), tl.load(epoch_ptr)
        signal_peers(peer, inside, parts, counter_ptr, wanted_ptr, signal_ptr, epoch, W)
    else:
        out_ptrs = out_ptr + row[:, None] * N + n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


def product(
    call: GroupedCall,
    operation: str,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None = None,
    bias_start: int = 0,
    put: Put | None = None,
) -> Tensor:
    """a[n]·B_e for every row n; b [E, N, K] if transposed, else [E, K, N]. What is put elsewhere is not returned."""
    a, b = solid(a), solid(b)
    depth, columns = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    variant = call.variant(operation, depth, columns, extra=bias is not None)
    if put is None and a.shape[0] == 0:
        return a.new_empty((0, columns))

    def launch(config: Config) -> Tensor:
        if isinstance(config, HopperConfig):
            from fusedmoe.kernels.gluon.grouped.launch import launch_product

            assert put is None, "calls that put are not tuned, and the Gluon form is no one's default"
            return launch_product(call, config, a, b, transposed, bias, bias_start)
        if put is not None and put.addresses.network is not None:
            # Calls of NVSHMEM take a few registers more.
            config = replace(config, registers=MOST_REGISTERS)
        out = a.new_empty((a.shape[0], columns)) if put is None else put.like
        box = [1, config.bn, config.bk] if transposed else [1, config.bk, config.bn]
        tiles = call.tiles(config.bm)
        product_kernel[(len(tiles.table) * triton.cdiv(columns, config.bn),)](
            described(a, [config.bm, config.bk]) if variant.bulk else a,
            described(b, box) if variant.bulk else b,
            bias, out, tiles.table, call.ends_E, len(tiles.table), depth, columns,
            bias_start, 0 if bias is None else bias.shape[1],
            **putting(put, len(tiles.table)),
            TRANSPOSED=transposed, BIAS=variant.extra, **constants(variant, config),
        )  # fmt: skip
        if put is None:
            return out
        finish(put)
        return out[:0]

    return call.run(variant, depth, columns, launch)
