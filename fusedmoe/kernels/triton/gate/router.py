"""The router's three products, as exact as float32: logits = x·Wᵀ, dx = dlogits·W, dW = dlogitsᵀ·x.

The tokens x and the matrix W are in half precision or float32, logits and their gradients always float32. Tensor cores
take no float32, so that a float32 operand is taken apart: beside bfloat16 into two or three bfloat16 summands, which
together hold 16 or 24 of its bits; else into two of tf32 (Triton's "tf32x3"). A plain float32 product on the ordinary
cores would take longer than an expert's. Definitions: the three expressions above.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.gate import summands_shape
from fusedmoe.kernels.generation import BLACKWELL, HOPPER, Capability, generation_of
from fusedmoe.kernels.triton.jit import jit

# Programs that fill a GPU: the sum over tokens in dW is cut so that there are about as many. A constant, since the
# result must not depend on the GPU.
_PROGRAMS = 264

# Elements that a program takes apart, or adds up at a time.
_BLOCK = 2048
_SUMMED = 4096
# Sums of a launch: CUDA's grids have no more along their second axis.
_MOST_SUMS = 65535


class Tile(NamedTuple):
    """Tile of a result, depth of a product's steps, and how a program is laid out."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth} w{self.warps}"


def width(experts: int) -> int:
    """Columns of a tile that holds a token's logits; a product has at least 16."""
    return max(16, 1 << (experts - 1).bit_length())


def product_tile(
    operation: str, apart: str, capability: Capability | None, tokens: int, experts: int, even: bool = True
) -> Tile:
    """Returns the tile of one of the router's products.

    Args:
        operation: "logits", "dx" or "dw".
        apart: how operands are taken apart (`taken_apart`); "summed" for dlogits that have been before.
        capability: generation of the GPU; None for the interpreter, which pays for programs and steps, not their size.
        even: M is a multiple of 128.
    """
    if capability is None:
        return Tile(64, 256, 128, 4, 1)
    if HOPPER <= capability < BLACKWELL:
        tile = _hopper_tile(operation, apart, tokens, experts, even)
        if tile is not None:
            return tile
    if operation == "logits":
        if apart == "both":
            return Tile(64, 64, 32, 8, 3)
        return Tile(64, 128, 32, 8, 3) if apart else Tile(128, 128, 64, 8, 3)
    if apart == "both":
        return Tile(64, 64, 32, 8, 2)
    if apart == "summed":
        if operation == "dx":
            return Tile(128, 128, 32, 8, 3)
        if even and experts % 64 == 0:
            return Tile(64, 128, 64, 4, 3)
        return Tile(64, 128, 64, 8, 2) if capability >= BLACKWELL else Tile(64, 128, 32, 8, 3)
    if capability >= BLACKWELL:
        return Tile(64, 128, 32 if operation == "dx" else 64, 8, 2)
    return Tile(128 if operation == "dx" else 64, 128, 32, 8, 2)


# Hopper, half precision. Operands come from the second cache, at some 5.5 TB/s: there a tile of 128 rows and columns
# needs more time to come than to be multiplied, so that tiles are as large as registers let them be, and there is one
# program on a multiprocessor. By the experts that a tile has to hold.
_HOPPER_LOGITS = {128: Tile(128, 128, 64, 8, 3), 256: Tile(128, 256, 64, 8, 4)}
_HOPPER_LOGITS_FEW = {128: Tile(64, 128, 64, 4, 4), 256: Tile(64, 256, 64, 8, 3)}  # tokens for which those are too few
_HOPPER_LOGITS_MANY = {128: Tile(256, 128, 64, 8, 4), 256: Tile(128, 256, 64, 8, 4)}
_HOPPER_DX = {16: Tile(128, 128, 16, 8, 3), 32: Tile(128, 128, 32, 8, 3), 64: Tile(128, 128, 64, 8, 3)}
_HOPPER_DX |= {128: Tile(128, 128, 128, 8, 3), 256: Tile(128, 256, 64, 8, 3)}
_HOPPER_DX_FEW = _HOPPER_DX | {128: Tile(128, 128, 64, 8, 2)}
_HOPPER_DW = {16: Tile(16, 128, 128, 4, 4), 32: Tile(32, 128, 128, 4, 4), 128: Tile(128, 256, 64, 8, 3)}
_MULTIPROCESSORS = 132
# Tokens for which gradients have smaller tiles.
_FEW_TOKENS = 2**15


def _hopper_tile(operation: str, apart: str, tokens: int, experts: int, even: bool) -> Tile | None:
    columns = min(width(experts), 256)
    if operation == "logits" and not apart:
        few, many = tokens < 128 * _MULTIPROCESSORS, tokens >= 1024 * _MULTIPROCESSORS
        tiles = _HOPPER_LOGITS_FEW if few else _HOPPER_LOGITS_MANY if many else _HOPPER_LOGITS
        return tiles[max(columns, 128)]
    if apart != "summed" or not even:
        return None
    few = tokens < _FEW_TOKENS
    if operation == "dx":
        return (_HOPPER_DX_FEW if few else _HOPPER_DX)[columns]
    return _HOPPER_DW.get(min(columns, 128)) if columns <= 32 or (experts % 64 == 0 and not few) else None


@triton.jit
def summand(rest):
    """The bfloat16 next to a float32, and what is left."""
    high = rest.to(tl.bfloat16)
    return high, rest - high.to(tl.float32)


@triton.jit
def _nearest(x):
    """The bfloat16 next to a float32, as a float32; the interpreter's conversion would cut off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def store_summands(out, plane, d, mask):
    """d as two bfloat16, the second `plane` elements behind the first."""
    high = _nearest(d)
    tl.store(out, high.to(tl.bfloat16), mask=mask)
    tl.store(out + plane, _nearest(d - high).to(tl.bfloat16), mask=mask)


@jit(do_not_specialize=["count"])
def summands_kernel(d_ptr, out_ptr, count, E, stride, plane, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """PADDED: rows of the result are longer than those of d, and end in zeros."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = place < count
    if PADDED:
        row, e = place // stride, place % stride
        d = tl.load(d_ptr + row * E + e, mask=known & (e < E), other=0.0)
    else:
        d = tl.load(d_ptr + place, mask=known, other=0.0)
    store_summands(out_ptr + place, plane, d, known)


@jit(do_not_specialize=["rows", "half"])
def sum_kernel(
    parts_ptr, first_ptr, second_ptr, rows, columns,
    # Sums that go to the first result; the others go to the second.
    half,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ over rows of parts [sums, rows, columns], always in one order."""
    which = tl.program_id(1)
    r = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    from_ptrs = parts_ptr + (which.to(tl.int64) * rows + r[:, None]) * columns + column[None, :]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for r0 in range(0, rows, ROWS):
        acc += tl.load(from_ptrs, mask=(r < rows - r0)[:, None] & known[None, :], other=0.0)
        from_ptrs += ROWS * columns
    total = tl.sum(acc, 0)
    # The sum has no columns in the other result: Triton 3.9's interpreter takes no mask made of a scalar comparison.
    first_columns = tl.where(which < half, columns, 0)
    first = first_ptr + which * columns + column
    tl.store(first, total.to(first_ptr.dtype.element_ty), mask=column < first_columns)
    second = second_ptr + (which - half) * columns + column
    tl.store(second, total.to(second_ptr.dtype.element_ty), mask=column < columns - first_columns)


@triton.jit
def mac(a, b, acc, TAKEN_APART: tl.constexpr, SUMMANDS: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + a·b. TAKEN_APART: the float32 side beside bfloat16, "a" or "b"; "both"; "" for two of one half type."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif TAKEN_APART == "":
        return tl.dot(a, b, acc)
    elif TAKEN_APART == "both":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    elif TAKEN_APART == "a":
        high, rest = summand(a)
        middle, rest = summand(rest)
        if SUMMANDS == 3:
            acc = tl.dot(rest.to(tl.bfloat16), b, acc)
        acc = tl.dot(middle, b, acc)
        return tl.dot(high, b, acc)
    else:
        high, rest = summand(b)
        middle, rest = summand(rest)
        if SUMMANDS == 3:
            acc = tl.dot(a, rest.to(tl.bfloat16), acc)
        acc = tl.dot(a, middle, acc)
        return tl.dot(a, high, acc)


@triton.jit
def logits_tile(
    x_ptr, w_ptr, row, expert, M,
    EVEN: tl.constexpr, TAKEN_APART: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x[row]·W[expert]ᵀ for BS rows and BE experts, all of them valid indices (clamped: a mask would cost the loads
    their way around the registers)."""
    m = tl.arange(0, BK)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * M + m[None, :]
    w_ptrs = w_ptr + expert[:, None].to(tl.int64) * M + m[None, :]
    # Sums are float32 whatever the operands are: near logits must not change places.
    acc = tl.zeros((BS, BE), dtype=tl.float32)
    for m0 in range(0, M, BK):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=m[None, :] < M - m0, other=0.0)
            w = tl.load(w_ptrs, mask=m[None, :] < M - m0, other=0.0)
        acc = mac(x, w.T, acc, TAKEN_APART, 3, INTERPRET)
        x_ptrs += BK
        w_ptrs += BK
    return acc


@jit(do_not_specialize=["S"])
def logits_kernel(
    x_ptr, w_ptr, logits_ptr, S, M, E,
    EVEN: tl.constexpr, TAKEN_APART: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Expert tiles run fastest: those of the same rows find them in the cache.
    tiles = tl.cdiv(E, BE)
    row = tl.program_id(0) // tiles * BS + tl.arange(0, BS)
    e = tl.program_id(0) % tiles * BE + tl.arange(0, BE)
    clamped = tl.minimum(row, S - 1)
    acc = logits_tile(x_ptr, w_ptr, clamped, tl.minimum(e, E - 1), M, EVEN, TAKEN_APART, INTERPRET, BS, BE, BK)
    out = logits_ptr + row[:, None].to(tl.int64) * E + e[None, :]
    tl.store(out, acc, mask=(row < S)[:, None] & (e < E)[None, :])


@jit(do_not_specialize=["S", "groups"])
def dx_kernel(
    dlogits_ptr, w_ptr, dx_ptr, S, M, E,
    # dlogits are SUMMANDS matrices, each `plane` elements behind the one before, with rows `stride` apart that end in
    # zeros. EVEN: E and M end where tiles do.
    stride, plane,
    # WHOLE: a step holds all experts. The dlogits of a program stay then, and the matrix passes by: of each of its
    # `groups` of columns.
    groups, SUMMANDS: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, TAKEN_APART: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    row = tl.program_id(0) // groups * BS + tl.arange(0, BS)
    group = tl.program_id(0) % groups
    m = tl.arange(0, BM)
    clamped = tl.minimum(row, S - 1).to(tl.int64)
    e = tl.arange(0, BK)
    d_ptrs = dlogits_ptr + clamped[:, None] * stride + e[None, :]
    out = dx_ptr + row[:, None].to(tl.int64) * M + m[None, :]
    if WHOLE:
        tl.static_assert(SUMMANDS == 2)
        in_d = e[None, :] < stride
        high = tl.load(d_ptrs) if EVEN else tl.load(d_ptrs, mask=in_d, other=0.0)
        low = tl.load(d_ptrs + plane) if EVEN else tl.load(d_ptrs + plane, mask=in_d, other=0.0)
        for tile in range(group * tiles // groups, (group + 1) * tiles // groups):
            w_ptrs = w_ptr + e[:, None].to(tl.int64) * M + (tile * BM + m)[None, :]
            in_w = (e[:, None] < E) & (m < M - tile * BM)[None, :]
            w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_w, other=0.0)
            acc = mac(high, w, tl.zeros((BS, BM), dtype=tl.float32), TAKEN_APART, 2, INTERPRET)
            acc = mac(low, w, acc, TAKEN_APART, 2, INTERPRET)
            known = (row < S)[:, None] & (m < M - tile * BM)[None, :]
            tl.store(out + tile * BM, acc.to(dx_ptr.dtype.element_ty), mask=known)
    else:
        m += group * BM
        w_ptrs = w_ptr + e[:, None].to(tl.int64) * M + m[None, :]
        acc = tl.zeros((BS, BM), dtype=tl.float32)
        for e0 in range(0, E, BK):
            in_d, in_w = e[None, :] < stride - e0, (e[:, None] < E - e0) & (m < M)[None, :]
            w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_w, other=0.0)
            for place in tl.static_range(SUMMANDS):
                at = d_ptrs + place * plane
                d = tl.load(at) if EVEN else tl.load(at, mask=in_d, other=0.0)
                acc = mac(d, w, acc, TAKEN_APART, 2, INTERPRET)
            d_ptrs += BK
            w_ptrs += BK * M
        tl.store(out + group * BM, acc.to(dx_ptr.dtype.element_ty), mask=(row < S)[:, None] & (m < M)[None, :])


@jit(do_not_specialize=["S", "part_rows"])
def dw_kernel(
    dlogits_ptr, x_ptr, dw_ptr, S, M, E, part_rows,
    # As in `dx_kernel`.
    stride, plane, SUMMANDS: tl.constexpr, EVEN: tl.constexpr, TAKEN_APART: tl.constexpr, INTERPRET: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[part] = Σ over the part's tokens of dlogits[s]ᵀ·x[s]."""
    # Hopper multiplies 64 rows or more, but as few columns as 8: few experts are the columns.
    SWAPPED: tl.constexpr = BE < 64
    tiles = tl.cdiv(M, BM)
    e = tl.program_id(0) // tiles * BE + tl.arange(0, BE)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    start = part * part_rows
    end = tl.minimum(start + part_rows, S)
    s = tl.arange(0, BK)
    d_ptrs = dlogits_ptr + (start + s)[:, None].to(tl.int64) * stride + e[None, :]
    x_ptrs = x_ptr + (start + s)[:, None].to(tl.int64) * M + m[None, :]
    in_e, in_m = (e < stride)[None, :], (m < M)[None, :]
    acc = tl.zeros((BM, BE) if SWAPPED else (BE, BM), dtype=tl.float32)
    for s0 in range(start, end, BK):
        # Both sides are masked: zero times what lies behind a tensor could be NaN.
        inside = (s < end - s0)[:, None]
        x = tl.load(x_ptrs, mask=inside if EVEN else inside & in_m, other=0.0)
        for place in tl.static_range(SUMMANDS):
            d = tl.load(d_ptrs + place * plane, mask=inside if EVEN else inside & in_e, other=0.0)
            if SWAPPED:
                tl.static_assert(TAKEN_APART == "")
                acc = mac(x.T, d, acc, TAKEN_APART, 2, INTERPRET)
            else:
                acc = mac(d.T, x, acc, TAKEN_APART, 2, INTERPRET)
        d_ptrs += BK * stride
        x_ptrs += BK * M
    out = dw_ptr + (part.to(tl.int64) * E + e[:, None]) * M + m[None, :]
    if SWAPPED:
        acc = acc.T
    tl.store(out, acc.to(dw_ptr.dtype.element_ty), mask=(e < E)[:, None] & in_m)


def taken_apart(a: torch.dtype, b: torch.dtype) -> str:
    """Returns which operand of a product is float32 and must be taken apart, in the words of `mac`."""
    if a == b and a != torch.float32:
        return ""
    if (a, b) == (torch.float32, torch.bfloat16):
        return "a"
    if (a, b) == (torch.bfloat16, torch.float32):
        return "b"
    return "both"


def logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x·Wᵀ, float32 [S, E]."""
    x_SM, weight_EM = x_SM.contiguous(), weight_EM.contiguous()
    (S, M), E = x_SM.shape, weight_EM.shape[0]
    out_SE = torch.empty((S, E), dtype=torch.float32, device=x_SM.device)
    if out_SE.numel():
        apart = taken_apart(x_SM.dtype, weight_EM.dtype)
        tile = product_tile("logits", apart, generation_of(x_SM.device), S, E)
        grid = (triton.cdiv(S, tile.rows) * triton.cdiv(E, tile.columns),)
        launch = {"EVEN": M % tile.depth == 0, **launch_options(apart, tile, "BS", "BE")}
        logits_kernel[grid](x_SM, weight_EM, out_SE, S, M, E, **launch)
    return out_SE


def dx(dlogits: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    """dlogits·W, [S, M]; dlogits [S, E], or as `room_for_summands` where W is bfloat16."""
    weight_EM = weight_EM.contiguous()
    S, (E, M) = dlogits.shape[-2], weight_EM.shape
    dx_SM = torch.empty((S, M), dtype=dtype, device=dlogits.device)
    if dx_SM.numel():
        dlogits, apart, summed = _summands(dlogits, weight_EM.dtype)
        table, stride = generation_of(dx_SM.device), dlogits.shape[2]
        tile = product_tile("dx", summed or apart, table, S, E, M % 128 == 0)
        rows, groups = triton.cdiv(S, tile.rows), triton.cdiv(M, tile.columns)
        whole = is_whole(len(dlogits), stride, M, tile, table)
        if whole:  # as few as fill a GPU some times over
            groups = min(groups, triton.cdiv(4 * _MULTIPROCESSORS, rows))
        even = E % tile.depth == 0 and M % tile.columns == 0
        launch = {"EVEN": even, "SUMMANDS": len(dlogits), "WHOLE": whole, **launch_options(apart, tile, "BS", "BM")}
        dx_kernel[(rows * groups,)](dlogits, weight_EM, dx_SM, S, M, E, stride, S * stride, groups, **launch)
    return dx_SM


def is_whole(summands: int, stride: int, M: int, tile: Tile, capability: Capability | None) -> bool:
    """Returns whether dlogits stay in a program while the matrix passes by (`dx_kernel`)."""
    fits = stride <= tile.depth and M % tile.columns == 0
    return summands == 2 and fits and (capability is None or capability < BLACKWELL)


def dw(dlogits: Tensor, x_SM: Tensor, dtype: torch.dtype, experts: int) -> Tensor:
    """dlogitsᵀ·x, [E, M]; dlogits [S, E], or as `room_for_summands` where x is bfloat16. Parts of the tokens are summed
    apart, and then the parts, always in one order."""
    x_SM = x_SM.contiguous()
    (S, M), E = x_SM.shape, experts
    if S == 0:
        return torch.zeros((E, M), dtype=dtype, device=x_SM.device)
    dlogits, apart, summed = _summands(dlogits, x_SM.dtype)
    tile = product_tile("dw", summed or apart, generation_of(x_SM.device), S, E, M % 128 == 0)
    # The result has few tiles, so the sum over tokens is cut as well, into parts that fill a GPU.
    tiles = triton.cdiv(E, tile.rows) * triton.cdiv(M, tile.columns)
    programs = _MULTIPROCESSORS if tile.columns == 256 else _PROGRAMS
    steps = triton.cdiv(S, tile.depth)
    part_rows = triton.cdiv(steps, min(max(programs // tiles, 1), steps)) * tile.depth
    parts, stride = triton.cdiv(S, part_rows), dlogits.shape[2]
    dw_EM = torch.empty((E, M), dtype=dtype, device=x_SM.device)
    out = dw_EM if parts == 1 else torch.empty((1, parts, E * M), dtype=torch.float32, device=x_SM.device)
    even = E % tile.rows == 0 and M % tile.columns == 0
    launch = {"EVEN": even, "SUMMANDS": len(dlogits), **launch_options(apart, tile, "BE", "BM")}
    dw_kernel[(tiles, parts)](dlogits, x_SM, out, S, M, E, part_rows, stride, S * stride, **launch)
    if parts > 1:
        sum_of_parts(out, dw_EM)
    return dw_EM


def sum_of_parts(parts: Tensor, *results: Tensor) -> None:
    """Σ over the last dimension but one of float32 parts [sums, …, rows, columns]; each result has as many sums."""
    rows, columns = parts.shape[-2:]
    first, second = results[0], results[-1]
    block, sums = block_of_parts(rows), parts.numel() // (rows * columns)
    if sums > _MOST_SUMS:  # short sequences, each of which has sums of its own
        for whole, result in zip(parts.view(len(results), -1, rows, columns), results, strict=True):
            pieces = whole.split(_MOST_SUMS), result.view(-1, columns).split(_MOST_SUMS)
            for piece, own in zip(*pieces, strict=True):
                sum_of_parts(piece, own)
        return
    grid = (triton.cdiv(columns, block["COLUMNS"]), sums)
    sum_kernel[grid](parts, first, second, rows, columns, sums // len(results), **block, num_warps=8)


def block_of_parts(rows: int) -> dict[str, int]:
    """Rows and columns that a program adds up at a time: all rows, up to 512."""
    at_once = min(triton.next_power_of_2(rows), 512)
    return {"ROWS": at_once, "COLUMNS": _SUMMED // max(at_once, 4)}


def room_for_summands(tokens: int, experts: int, device: torch.device) -> Tensor:
    """Room for dlogits as two bfloat16 summands."""
    return torch.empty(summands_shape(tokens, experts), dtype=torch.bfloat16, device=device)


def _summands(dlogits: Tensor, other: torch.dtype) -> tuple[Tensor, str, str]:
    """dlogits as one matrix or two [SUMMANDS, S, E], for a product with `other`; what is left to take apart there; and
    "summed" where there are two."""
    # Taken apart once, in memory: both summands take the room of the float32 number, and go from there to the tensor
    # cores without passing the registers.
    if dlogits.dim() == 3:
        return dlogits, "", "summed"
    apart = taken_apart(dlogits.dtype, other)
    if apart != "a":
        return dlogits.contiguous()[None], apart, ""
    dlogits, (S, E) = dlogits.contiguous(), dlogits.shape
    both = room_for_summands(S, E, dlogits.device)
    count, stride = both[0].numel(), both.shape[2]
    grid, padded = (triton.cdiv(count, _BLOCK),), stride != E
    summands_kernel[grid](dlogits, both, count, E, stride, count, PADDED=padded, BLOCK=_BLOCK, num_warps=4)
    return both, "", "summed"


def launch_options(apart: str, tile: Tile, rows: str, columns: str) -> dict[str, Any]:
    return {
        "TAKEN_APART": apart,
        "INTERPRET": INTERPRET,
        rows: tile.rows,
        columns: tile.columns,
        "BK": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
