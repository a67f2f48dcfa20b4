"""Weight gradient of the experts: out_e = Σ over the rows n of expert e of left[n]ᵀ·right[n].

A grouped GEMM of ragged depth; either side may be gathered. An expert without rows gets zeros. The epilogue may add
gradients of other rows in float32, so a chunked layer accumulates without another pass over the matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.grouped.call import GroupedCall, aligned, constants, tensor_descriptor
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import halves, mac, swizzle
from fusedmoe.kernels.triton.jit import jit


@triton.jit
def _source(source_ptr, row, last, GATHER: tl.constexpr, NARROW: tl.constexpr):
    """Return the index of a gathered row, clamped to the last one: rows past it are prefetched and not used."""
    if GATHER:
        source = tl.load(source_ptr + tl.minimum(row, last))
        return source.to(tl.int32) if NARROW else source
    else:
        return row


@jit
def dweight_kernel(
    # Both sides, [rows, P] and [rows, Q]; with DESCRIPTORS also descriptors of those not gathered, for whole blocks.
    left_ptr, right_ptr, left_rows, right_rows,
    # Indices of the gathered side, accumulator or None (may be the output, then in float32), output, first row of each
    # expert.
    source_ptr, total_ptr, out_ptr, starts_ptr, P, Q,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    # EVEN: tiles end where the matrix does. NARROW: 32-bit element offsets in whole blocks.
    DESCRIPTORS: tl.constexpr, EVEN: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # A program sums all rows of its tile, so the order of the sum is fixed.
    expert = tl.program_id(1)
    p_tile, q_tile = swizzle(tl.program_id(0), tl.cdiv(P, BP), tl.cdiv(Q, BQ), GROUP)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    p = p_tile * BP + tl.arange(0, BP)
    q = q_tile * BQ + tl.arange(0, BQ)
    in_p, in_q = (p < P)[None, :], (q < Q)[None, :]

    acc = tl.zeros((BP, BQ), dtype=tl.float32)
    full_end = start + (end - start) // BK * BK
    # Row indices are loaded one block ahead: an indirect load inside the loop would disable its pipelining.
    row = start + tl.arange(0, BK)
    row = row if NARROW else row.to(tl.int64)
    last = tl.maximum(end - 1, 0)
    source = _source(source_ptr, row, last, GATHER_LEFT or GATHER_RIGHT, NARROW)
    for row0 in range(start, full_end, BK):
        if DESCRIPTORS and not GATHER_LEFT:
            left = left_rows.load([row0, p_tile * BP])
        else:
            left_ptrs = left_ptr + (source if GATHER_LEFT else row)[:, None] * P + p[None, :]
            left = tl.load(left_ptrs) if EVEN else tl.load(left_ptrs, mask=in_p, other=0.0)
        if DESCRIPTORS and not GATHER_RIGHT:
            right = right_rows.load([row0, q_tile * BQ])
        else:
            right_ptrs = right_ptr + (source if GATHER_RIGHT else row)[:, None] * Q + q[None, :]
            right = tl.load(right_ptrs) if EVEN else tl.load(right_ptrs, mask=in_q, other=0.0)
        row += BK
        source = _source(source_ptr, row, last, GATHER_LEFT or GATHER_RIGHT, NARROW)
        acc = mac(left.T, right, acc, PRECISION, INTERPRET)
    if full_end < end:
        # Remaining rows. Both sides are masked: zero times uninitialized memory could be NaN.
        rest = (row < end)[:, None]
        left_ptrs = left_ptr + (source if GATHER_LEFT else row).to(tl.int64)[:, None] * P + p[None, :]
        right_ptrs = right_ptr + (source if GATHER_RIGHT else row).to(tl.int64)[:, None] * Q + q[None, :]
        left = tl.load(left_ptrs, mask=rest & in_p, other=0.0)
        right = tl.load(right_ptrs, mask=rest & in_q, other=0.0)
        acc = mac(left.T, right, acc, PRECISION, INTERPRET)
    first = expert.to(tl.int64) * P * Q
    if total_ptr is None:
        out_ptrs = out_ptr + first + p[:, None].to(tl.int64) * Q + q[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(p < P)[:, None] & (q < Q)[None, :])
    else:
        # Registers cannot hold all columns of the accumulator and the sums.
        left_half, right_half = halves(acc, BP, BQ)
        for half in tl.static_range(2):
            one, other = halves(left_half if half == 0 else right_half, BP, BQ // 2)
            for quarter in tl.static_range(2):
                part = one if quarter == 0 else other
                column = q_tile * BQ + (2 * half + quarter) * (BQ // 4) + tl.arange(0, BQ // 4)
                offset = first + p[:, None].to(tl.int64) * Q + column[None, :]
                inside = (p < P)[:, None] & (column < Q)[None, :]
                part += tl.load(total_ptr + offset, mask=inside, other=0.0).to(tl.float32)
                tl.store(out_ptr + offset, part.to(out_ptr.dtype.element_ty), mask=inside)


def dweight(
    call: GroupedCall, operation: str, left: Tensor, right: Tensor, gather: str | None, total: Tensor | None = None
) -> Tensor:
    """Return [E, P, Q]; rows of the `gather` side are gathered.

    `total` [E, P, Q] is added: in place in float32; half precision in new float32 memory, to round the sum of all
    chunks once.
    """
    layout = call.layout
    if layout.source_N is None:
        gather = None
    left, right = aligned(left), aligned(right)
    p, q = left.shape[1], right.shape[1]
    if layout.rows == 0:
        return left.new_zeros((layout.experts, p, q)) if total is None else total.float()
    variant = call.variant(operation, p, q, gather=gather is not None, extra=total is not None)
    total = None if total is None else aligned(total)
    dtype = left.dtype if total is None else torch.float32

    # A side loaded by bulk copies has no element offsets, so it may be larger.
    looked_up = {"left": left, "right": right}.get(gather or "")
    addressed = [left, right] if not variant.bulk else [] if looked_up is None else [looked_up]
    narrow = max((side.numel() for side in addressed), default=0) < 2**31

    def launch(config: Config, out: Tensor | None = None) -> Tensor:
        # Launches repeated for tuning must not accumulate into `total` each time.
        out = left.new_empty((layout.experts, p, q), dtype=dtype) if out is None else out
        if isinstance(config, HopperConfig):
            from fusedmoe.kernels.gluon.grouped.launch import launch_dweight

            launch_dweight(call, config, left, right, gather == "left", total, out)
            return out
        given = constants(variant, config)
        given |= {"BP": given.pop("BM"), "BQ": given.pop("BN")}
        given["EVEN"] = given.pop("EVEN_K") and p % config.bm == 0 and q % config.bn == 0
        left_rows = tensor_descriptor(left, [config.bk, config.bm]) if variant.bulk and gather != "left" else None
        right_rows = tensor_descriptor(right, [config.bk, config.bn]) if variant.bulk and gather != "right" else None
        dweight_kernel[(triton.cdiv(p, config.bm) * triton.cdiv(q, config.bn), layout.experts)](
            left, right, left_rows, right_rows, layout.source_N, total, out, call.starts_E1, p, q,
            GATHER_LEFT=gather == "left", GATHER_RIGHT=gather == "right", NARROW=narrow, **given,
        )  # fmt: skip
        return out

    return launch(call.config(variant, p, q, launch), total if total is not None and total.dtype == dtype else None)
