"""Gradient of the experts' matrices: out_e = Σ over the rows n of expert e of left[n]ᵀ·right[n].

A product of ragged depth. Either side's rows may be gathered. An expert without rows gets zeros. Gradients of other
rows may be added on the way out, in float32: so a layer in chunks adds them up without a pass over all matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.grouped.call import GroupedCall, constants, described, solid
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig
from fusedmoe.kernels.triton.grouped.device import halves, mac, swizzle
from fusedmoe.kernels.triton.jit import jit


@triton.jit
def _source(source_ptr, row, last, GATHER: tl.constexpr, NARROW: tl.constexpr):
    """Returns where a row is looked up; the last one for rows past it, which are prefetched and not used."""
    if GATHER:
        source = tl.load(source_ptr + tl.minimum(row, last))
        return source.to(tl.int32) if NARROW else source
    else:
        return row


@jit
def dweight_kernel(
    # Both sides, [rows, P] and [rows, Q]; with DESCRIPTORS also descriptors of those that are not gathered, which are
    # read in whole blocks of rows.
    left_ptr, right_ptr, left_rows, right_rows,
    # Which row a gathered side reads, the experts' matrices, the first row of each expert, and sizes.
    # Where `total_ptr` is not None: matrices that are added, which may be those of the results, in float32 then.
    source_ptr, total_ptr, out_ptr, starts_ptr, P, Q,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    # EVEN: tiles end where the matrix does. NARROW: in whole blocks, elements are counted in 32 bits.
    DESCRIPTORS: tl.constexpr, EVEN: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    # Tiles, and rows of a step (`configs.py`).
    BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # A matrix of each expert is a grid of its own: its rows are summed by one program for each tile, so that the
    # order of the sum is fixed and an expert without rows gets zeros.
    expert = tl.program_id(1)
    p_tile, q_tile = swizzle(tl.program_id(0), tl.cdiv(P, BP), tl.cdiv(Q, BQ), GROUP)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    p = p_tile * BP + tl.arange(0, BP)
    q = q_tile * BQ + tl.arange(0, BQ)
    in_p, in_q = (p < P)[None, :], (q < Q)[None, :]

    acc = tl.zeros((BP, BQ), dtype=tl.float32)
    full_end = start + (end - start) // BK * BK
    # The next block's source rows are read one block ahead: an indirect load inside the loop would cost it its stages.
    row = start + tl.arange(0, BK)
    row = row if NARROW else row.to(tl.int64)
    last = tl.maximum(end - 1, 0)
    source = _source(source_ptr, row, last, GATHER_LEFT or GATHER_RIGHT, NARROW)
    # Main loop: whole blocks of the expert's rows, so that no row is masked.
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
        # The rows that are left. Both sides are masked: zero times an unwritten row could be NaN.
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
        # Some columns at a time: what is added to all of them would not fit the registers beside the sums.
        left_half, right_half = halves(acc, BP, BQ)
        for half in tl.static_range(2):
            one, other = halves(left_half if half == 0 else right_half, BP, BQ // 2)
            for quarter in tl.static_range(2):
                part = one if quarter == 0 else other
                column = q_tile * BQ + (2 * half + quarter) * (BQ // 4) + tl.arange(0, BQ // 4)
                places = first + p[:, None].to(tl.int64) * Q + column[None, :]
                inside = (p < P)[:, None] & (column < Q)[None, :]
                part += tl.load(total_ptr + places, mask=inside, other=0.0).to(tl.float32)
                tl.store(out_ptr + places, part.to(out_ptr.dtype.element_ty), mask=inside)


def dweight(
    call: GroupedCall, operation: str, left: Tensor, right: Tensor, gather: str | None, total: Tensor | None = None
) -> Tensor:
    """Σ over each expert's rows of left[n]ᵀ·right[n], [E, P, Q]; `gather`: which side's rows are looked up.

    `total`: [E, P, Q], to which it is added: in place in float32, of half precision into new float32 memory, so that a
    sum over chunks is rounded once.
    """
    layout = call.layout
    if layout.source_N is None:
        gather = None
    left, right = solid(left), solid(right)
    p, q = left.shape[1], right.shape[1]
    if layout.rows == 0:
        return left.new_zeros((layout.experts, p, q)) if total is None else total.float()
    variant = call.variant(operation, p, q, gather=gather is not None, extra=total is not None)
    total = None if total is None else solid(total)
    dtype = left.dtype if total is None else torch.float32

    # A side that comes by bulk copies has no addresses of its own, and may be large.
    looked_up = {"left": left, "right": right}.get(gather or "")
    addressed = [left, right] if not variant.bulk else [] if looked_up is None else [looked_up]
    narrow = max((side.numel() for side in addressed), default=0) < 2**31

    def launch(config: Config, out: Tensor | None = None) -> Tensor:
        # Launches that are repeated to choose a configuration must not add to `total` each time.
        out = left.new_empty((layout.experts, p, q), dtype=dtype) if out is None else out
        if isinstance(config, HopperConfig):
            from fusedmoe.kernels.gluon.grouped.launch import launch_dweight

            launch_dweight(call, config, left, right, gather == "left", total, out)
            return out
        given = constants(variant, config)
        given |= {"BP": given.pop("BM"), "BQ": given.pop("BN")}
        given["EVEN"] = given.pop("EVEN_K") and p % config.bm == 0 and q % config.bn == 0
        left_rows = described(left, [config.bk, config.bm]) if variant.bulk and gather != "left" else None
        right_rows = described(right, [config.bk, config.bn]) if variant.bulk and gather != "right" else None
        dweight_kernel[(triton.cdiv(p, config.bm) * triton.cdiv(q, config.bn), layout.experts)](
            left, right, left_rows, right_rows, layout.source_N, total, out, call.starts_E1, p, q,
            GATHER_LEFT=gather == "left", GATHER_RIGHT=gather == "right", NARROW=narrow, **given,
        )  # fmt: skip
        return out

    return launch(call.config(variant, p, q, launch), total if total is not None and total.dtype == dtype else None)
