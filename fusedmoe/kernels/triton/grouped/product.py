"""Grouped GEMM of rows with their expert's matrix: out[n] = a[n]·B_e (+ bias). Down projection and rows' gradient.

B_e is stored [K, N] (`dX = dH·W1`) or transposed, [N, K] (`Y = A·W2ᵀ`).

Results may be put directly to other ranks (`PUT`). For remote peers (`NVSHMEM`) programs store them in staging. The
last program to finish a row tile puts its whole rows while other tiles are still computed: a program's part of a row, a
few hundred bytes, is too small for a put.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.one_sided import Put
from fusedmoe.kernels.triton.grouped.call import GroupedCall, aligned, constants, put_arguments, tensor_descriptor
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import halves, mac, swizzle
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import put_runs
from fusedmoe.kernels.triton.one_sided.put import finish_put, signal_idle_peers, signal_peers


@triton.jit
def _put(part, weight, target, inside, column, N, WEIGHTED: tl.constexpr):
    """Store some columns of a tile directly at their destination ranks.

    Rounds before and after applying the weight, which equals weighting stored results.
    """
    dtype: tl.constexpr = target.dtype.element_ty
    out = part.to(dtype)
    if WEIGHTED:
        out = (out.to(tl.float32) * weight[:, None]).to(dtype)
    tl.store(target[:, None] + column[None, :], out, mask=inside[:, None] & (column < N)[None, :])


@jit(do_not_specialize=["n_row_tiles", "bias_start", "bias_columns"])
def product_kernel(
    a, b, bias_ptr, out_ptr,
    tiles_ptr, ends_ptr, n_row_tiles, K, N, bias_start, bias_columns,
    # Puts: addresses, weights, peers, and the counters and signals of completed peers.
    address_ptr, weight_ptr, peer_ptr, counter_ptr, num_rows_ptr, signal_ptr,
    # For remote peers: count of finished tiles per row tile, addresses at the peer, PEs.
    done_ptr, target_ptr, pe_ptr, epoch_ptr, W,
    TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PUT: tl.constexpr, NVSHMEM: tl.constexpr, WEIGHTED: tl.constexpr,
    # ALIGNED: all addresses are multiples of 16 bytes.
    ALIGNED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tile, col_tile = swizzle(tl.program_id(0), n_row_tiles, tl.cdiv(N, BN), GROUP)
    if PUT:
        # A rank that gets no row would wait forever.
        if tl.program_id(0) == 0:
            signal_idle_peers(num_rows_ptr, signal_ptr, tl.load(epoch_ptr), W)
    expert = tl.load(tiles_ptr + 2 * row_tile)
    if expert < 0:
        return
    start = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(ends_ptr + expert)
    n0 = col_tile * BN

    row = start + tl.arange(0, BM)
    inside = row < end
    # Clamped, because a masked operand could not be copied to the tensor cores directly. Row times width exceeds 2³¹.
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

    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        if DESCRIPTORS:
            # A tile's box may extend into the next expert's rows, whose results are not stored.
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
                # As in `dhidden_kernel`.
                if EVEN_K:
                    b_tile = tl.load(b_ptrs, mask=(n < N)[None, :], other=0.0)
                else:
                    b_tile = tl.load(b_ptrs, mask=(k[:, None] < K - k0) & (n < N)[None, :], other=0.0)
                b_ptrs += BK * N
            a_ptrs += BK
        acc = mac(a_tile, b_tile, acc, PRECISION, INTERPRET)

    # A shard of the experts owns a slice of the bias.
    if BIAS:
        of_bias = (n >= bias_start) & (n < bias_start + bias_columns)
        bias = tl.load(bias_ptr + expert * bias_columns + n - bias_start, mask=of_bias, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if PUT:
        if WEIGHTED:
            weight = tl.load(weight_ptr + row).to(tl.float32)
        else:
            weight = tl.full((BM,), 1.0, dtype=tl.float32)
        # Addresses of all columns would not fit the registers.
        target = tl.load(address_ptr + row).to(out_ptr.dtype)
        if ALIGNED:
            target = tl.multiple_of(target, [16])
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
        signal_peers(peer, inside, parts, counter_ptr, num_rows_ptr, signal_ptr, epoch, W)
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
    """Return a[n]·B_e for every row n, or no rows with `put`; b is [E, N, K] if transposed, else [E, K, N]."""
    a, b = aligned(a), aligned(b)
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
            # NVSHMEM calls take additional registers.
            config = replace(config, registers=MAX_REGISTERS)
        out = a.new_empty((a.shape[0], columns)) if put is None else put.like
        box = [1, config.bn, config.bk] if transposed else [1, config.bk, config.bn]
        tiles = call.tiles(config.bm)
        product_kernel[(len(tiles.table) * triton.cdiv(columns, config.bn),)](
            tensor_descriptor(a, [config.bm, config.bk]) if variant.bulk else a,
            tensor_descriptor(b, box) if variant.bulk else b,
            bias, out, tiles.table, call.ends_E, len(tiles.table), depth, columns,
            bias_start, 0 if bias is None else bias.shape[1],
            **put_arguments(put, len(tiles.table)),
            TRANSPOSED=transposed, BIAS=variant.extra, **constants(variant, config),
        )  # fmt: skip
        if put is None:
            return out
        finish_put(put)
        return out[:0]

    return call.run(variant, depth, columns, launch)
