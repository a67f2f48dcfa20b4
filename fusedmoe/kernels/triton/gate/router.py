"""The router's three GEMMs in float32 accuracy: logits = x·Wᵀ, dx = dlogits·W, dW = dlogitsᵀ·x.

x and W are half precision or float32; logits and their gradients are float32. Tensor cores do not multiply float32, so
a float32 operand is split: against bfloat16 into two or three bfloat16 summands, which hold 16 or 24 of its mantissa
bits; otherwise into two of tf32 (Triton's "tf32x3"). On CUDA cores a float32 GEMM would take longer than an expert's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import BLACKWELL, HOPPER, INTERPRET, Capability, generation_of
from fusedmoe.kernels.gate import summands_shape
from fusedmoe.kernels.triton.jit import jit

# Number of parts of the token sum of dW, which fill a GPU. Constant: the result must not depend on the GPU.
_PROGRAMS = 264

# Elements per program that splits or sums.
_BLOCK = 2048
_SUMMED = 4096
# Limit of CUDA's second grid axis.
_MAX_SUMS = 65535


class Tile(NamedTuple):
    """Output tile, depth of the K steps, warps and pipeline stages of a GEMM."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth} w{self.warps}"


def padded_width(experts: int) -> int:
    """Return the tile columns that hold a token's logits: a power of two, at least 16 as MMA requires."""
    return max(16, 1 << (experts - 1).bit_length())


def product_tile(
    operation: str, split: str, capability: Capability | None, tokens: int, experts: int, even: bool = True
) -> Tile:
    """Return the tile of a GEMM of the router.

    Args:
        operation: "logits", "dx" or "dw".
        split: operands to split (`operand_to_split`); "summed" for dlogits split beforehand.
        capability: generation of the GPU; None for the interpreter, whose cost depends on the number of programs.
        even: M is a multiple of 128.
    """
    if capability is None:
        return Tile(64, 256, 128, 4, 1)
    if HOPPER <= capability < BLACKWELL:
        tile = _hopper_tile(operation, split, tokens, experts, even)
        if tile is not None:
            return tile
    if operation == "logits":
        if split == "both":
            return Tile(64, 64, 32, 8, 3)
        return Tile(64, 128, 32, 8, 3) if split else Tile(128, 128, 64, 8, 3)
    if split == "both":
        return Tile(64, 64, 32, 8, 2)
    if split == "summed":
        if operation == "dx":
            return Tile(128, 128, 32, 8, 3)
        if even and experts % 64 == 0:
            return Tile(64, 128, 64, 4, 3)
        return Tile(64, 128, 64, 8, 2) if capability >= BLACKWELL else Tile(64, 128, 32, 8, 3)
    if capability >= BLACKWELL:
        return Tile(64, 128, 32 if operation == "dx" else 64, 8, 2)
    return Tile(128 if operation == "dx" else 64, 128, 32, 8, 2)


# Hopper, half precision, by the number of experts. L2 supplies about 5.5 TB/s, so a tile of 128 × 128 loads longer than
# it multiplies: tiles are as large as registers allow, with one program per multiprocessor.
_HOPPER_LOGITS = {128: Tile(128, 128, 64, 8, 3), 256: Tile(128, 256, 64, 8, 4)}
_HOPPER_LOGITS_FEW = {128: Tile(64, 128, 64, 4, 4), 256: Tile(64, 256, 64, 8, 3)}  # too few tokens for the tiles above
_HOPPER_LOGITS_MANY = {128: Tile(256, 128, 64, 8, 4), 256: Tile(128, 256, 64, 8, 4)}
_HOPPER_DX = {16: Tile(128, 128, 16, 8, 3), 32: Tile(128, 128, 32, 8, 3), 64: Tile(128, 128, 64, 8, 3)}
_HOPPER_DX |= {128: Tile(128, 128, 128, 8, 3), 256: Tile(128, 256, 64, 8, 3)}
_HOPPER_DX_FEW = _HOPPER_DX | {128: Tile(128, 128, 64, 8, 2)}
_HOPPER_DW = {16: Tile(16, 128, 128, 4, 4), 32: Tile(32, 128, 128, 4, 4), 128: Tile(128, 256, 64, 8, 3)}
_MULTIPROCESSORS = 132
_FEW_TOKENS = 2**15


def _hopper_tile(operation: str, split: str, tokens: int, experts: int, even: bool) -> Tile | None:
    columns = min(padded_width(experts), 256)
    if operation == "logits" and not split:
        few, many = tokens < 128 * _MULTIPROCESSORS, tokens >= 1024 * _MULTIPROCESSORS
        tiles = _HOPPER_LOGITS_FEW if few else _HOPPER_LOGITS_MANY if many else _HOPPER_LOGITS
        return tiles[max(columns, 128)]
    if split != "summed" or not even:
        return None
    few = tokens < _FEW_TOKENS
    if operation == "dx":
        return (_HOPPER_DX_FEW if few else _HOPPER_DX)[columns]
    return _HOPPER_DW.get(min(columns, 128)) if columns <= 32 or (experts % 64 == 0 and not few) else None


@triton.jit
def summand(rest):
    high = rest.to(tl.bfloat16)
    return high, rest - high.to(tl.float32)


@triton.jit
def _nearest(x):
    """Round float32 to the nearest bfloat16, returned as float32; the interpreter's conversion would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def store_summands(out, plane, d, mask):
    high = _nearest(d)
    tl.store(out, high.to(tl.bfloat16), mask=mask)
    tl.store(out + plane, _nearest(d - high).to(tl.bfloat16), mask=mask)


@jit(do_not_specialize=["count"])
def summands_kernel(d_ptr, out_ptr, count, E, stride, plane, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """PADDED: the result has longer rows than d, which end in zeros."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    if PADDED:
        row, e = offset // stride, offset % stride
        d = tl.load(d_ptr + row * E + e, mask=inside & (e < E), other=0.0)
    else:
        d = tl.load(d_ptr + offset, mask=inside, other=0.0)
    store_summands(out_ptr + offset, plane, d, inside)


@jit(do_not_specialize=["rows", "half"])
def sum_kernel(
    parts_ptr, first_ptr, second_ptr, rows, columns,
    half,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    r = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < columns
    from_ptrs = parts_ptr + (which.to(tl.int64) * rows + r[:, None]) * columns + column[None, :]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for r0 in range(0, rows, ROWS):
        acc += tl.load(from_ptrs, mask=(r < rows - r0)[:, None] & in_columns[None, :], other=0.0)
        from_ptrs += ROWS * columns
    total = tl.sum(acc, 0)
    # An empty mask for the other result, because Triton 3.9's interpreter rejects masks from scalar comparisons.
    first_columns = tl.where(which < half, columns, 0)
    first = first_ptr + which * columns + column
    tl.store(first, total.to(first_ptr.dtype.element_ty), mask=column < first_columns)
    second = second_ptr + (which - half) * columns + column
    tl.store(second, total.to(second_ptr.dtype.element_ty), mask=column < columns - first_columns)


@triton.jit
def mac(a, b, acc, SPLIT: tl.constexpr, SUMMANDS: tl.constexpr, INTERPRET: tl.constexpr):
    """Return acc + a·b. SPLIT: the float32 operand against bfloat16, "a" or "b"; "both"; "" for equal half dtypes."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif SPLIT == "":
        return tl.dot(a, b, acc)
    elif SPLIT == "both":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    elif SPLIT == "a":
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
    EVEN: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return x[row]·W[expert]ᵀ for BS rows and BE experts.

    All indices must be valid (clamped): a mask would make loads pass through registers.
    """
    m = tl.arange(0, BK)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * M + m[None, :]
    w_ptrs = w_ptr + expert[:, None].to(tl.int64) * M + m[None, :]
    # float32 for any operand dtype: rounding must not reorder close logits.
    acc = tl.zeros((BS, BE), dtype=tl.float32)
    for m0 in range(0, M, BK):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=m[None, :] < M - m0, other=0.0)
            w = tl.load(w_ptrs, mask=m[None, :] < M - m0, other=0.0)
        acc = mac(x, w.T, acc, SPLIT, 3, INTERPRET)
        x_ptrs += BK
        w_ptrs += BK
    return acc


@jit(do_not_specialize=["S"])
def logits_kernel(
    x_ptr, w_ptr, logits_ptr, S, M, E,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Expert tiles vary fastest, so tiles of the same rows hit the cache.
    tiles = tl.cdiv(E, BE)
    row = tl.program_id(0) // tiles * BS + tl.arange(0, BS)
    e = tl.program_id(0) % tiles * BE + tl.arange(0, BE)
    clamped = tl.minimum(row, S - 1)
    acc = logits_tile(x_ptr, w_ptr, clamped, tl.minimum(e, E - 1), M, EVEN, SPLIT, INTERPRET, BS, BE, BK)
    out = logits_ptr + row[:, None].to(tl.int64) * E + e[None, :]
    tl.store(out, acc, mask=(row < S)[:, None] & (e < E)[None, :])


@jit(do_not_specialize=["S", "groups"])
def dx_kernel(
    dlogits_ptr, w_ptr, dx_ptr, S, M, E,
    # dlogits are SUMMANDS matrices, `plane` elements apart, with zero-padded rows `stride` elements apart. EVEN: E and
    # M are multiples of the tile.
    stride, plane,
    # WHOLE: one step covers all experts. A program keeps its dlogits and loops over the columns of a group of `groups`.
    groups, SUMMANDS: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
    BS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    row = tl.program_id(0) // groups * BS + tl.arange(0, BS)
    group = tl.program_id(0) % groups
    m = tl.arange(0, BM)
    clamped = tl.minimum(row, S - 1).to(tl.int64)
    e = tl.arange(0, BK)
    dlogits_ptrs = dlogits_ptr + clamped[:, None] * stride + e[None, :]
    out = dx_ptr + row[:, None].to(tl.int64) * M + m[None, :]
    if WHOLE:
        tl.static_assert(SUMMANDS == 2)
        in_d = e[None, :] < stride
        high = tl.load(dlogits_ptrs) if EVEN else tl.load(dlogits_ptrs, mask=in_d, other=0.0)
        low = tl.load(dlogits_ptrs + plane) if EVEN else tl.load(dlogits_ptrs + plane, mask=in_d, other=0.0)
        for tile in range(group * tiles // groups, (group + 1) * tiles // groups):
            w_ptrs = w_ptr + e[:, None].to(tl.int64) * M + (tile * BM + m)[None, :]
            in_w = (e[:, None] < E) & (m < M - tile * BM)[None, :]
            w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_w, other=0.0)
            acc = mac(high, w, tl.zeros((BS, BM), dtype=tl.float32), SPLIT, 2, INTERPRET)
            acc = mac(low, w, acc, SPLIT, 2, INTERPRET)
            inside = (row < S)[:, None] & (m < M - tile * BM)[None, :]
            tl.store(out + tile * BM, acc.to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        m += group * BM
        w_ptrs = w_ptr + e[:, None].to(tl.int64) * M + m[None, :]
        acc = tl.zeros((BS, BM), dtype=tl.float32)
        for e0 in range(0, E, BK):
            in_d, in_w = e[None, :] < stride - e0, (e[:, None] < E - e0) & (m < M)[None, :]
            w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_w, other=0.0)
            for plane_index in tl.static_range(SUMMANDS):
                at = dlogits_ptrs + plane_index * plane
                d = tl.load(at) if EVEN else tl.load(at, mask=in_d, other=0.0)
                acc = mac(d, w, acc, SPLIT, 2, INTERPRET)
            dlogits_ptrs += BK
            w_ptrs += BK * M
        tl.store(out + group * BM, acc.to(dx_ptr.dtype.element_ty), mask=(row < S)[:, None] & (m < M)[None, :])


@jit(do_not_specialize=["S", "part_rows"])
def dw_kernel(
    dlogits_ptr, x_ptr, dw_ptr, S, M, E, part_rows,
    stride, plane, SUMMANDS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Hopper MMA has at least 64 rows but as few as 8 columns, so few experts are the columns.
    SWAPPED: tl.constexpr = BE < 64
    tiles = tl.cdiv(M, BM)
    e = tl.program_id(0) // tiles * BE + tl.arange(0, BE)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    start = part * part_rows
    end = tl.minimum(start + part_rows, S)
    s = tl.arange(0, BK)
    dlogits_ptrs = dlogits_ptr + (start + s)[:, None].to(tl.int64) * stride + e[None, :]
    x_ptrs = x_ptr + (start + s)[:, None].to(tl.int64) * M + m[None, :]
    in_e, in_m = (e < stride)[None, :], (m < M)[None, :]
    acc = tl.zeros((BM, BE) if SWAPPED else (BE, BM), dtype=tl.float32)
    for s0 in range(start, end, BK):
        # Both operands are masked: zero times data past the end of a tensor could be NaN.
        inside = (s < end - s0)[:, None]
        x = tl.load(x_ptrs, mask=inside if EVEN else inside & in_m, other=0.0)
        for plane_index in tl.static_range(SUMMANDS):
            d = tl.load(dlogits_ptrs + plane_index * plane, mask=inside if EVEN else inside & in_e, other=0.0)
            if SWAPPED:
                tl.static_assert(SPLIT == "")
                acc = mac(x.T, d, acc, SPLIT, 2, INTERPRET)
            else:
                acc = mac(d.T, x, acc, SPLIT, 2, INTERPRET)
        dlogits_ptrs += BK * stride
        x_ptrs += BK * M
    out = dw_ptr + (part.to(tl.int64) * E + e[:, None]) * M + m[None, :]
    if SWAPPED:
        acc = acc.T
    tl.store(out, acc.to(dw_ptr.dtype.element_ty), mask=(e < E)[:, None] & in_m)


def operand_to_split(a: torch.dtype, b: torch.dtype) -> str:
    """Return the operands of a GEMM that are float32 and must be split, as `SPLIT` of `mac`."""
    if a == b and a != torch.float32:
        return ""
    if (a, b) == (torch.float32, torch.bfloat16):
        return "a"
    if (a, b) == (torch.bfloat16, torch.float32):
        return "b"
    return "both"


def logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    x_SM, weight_EM = x_SM.contiguous(), weight_EM.contiguous()
    (S, M), E = x_SM.shape, weight_EM.shape[0]
    out_SE = torch.empty((S, E), dtype=torch.float32, device=x_SM.device)
    if out_SE.numel():
        split = operand_to_split(x_SM.dtype, weight_EM.dtype)
        tile = product_tile("logits", split, generation_of(x_SM.device), S, E)
        grid = (triton.cdiv(S, tile.rows) * triton.cdiv(E, tile.columns),)
        launch = {"EVEN": M % tile.depth == 0, **launch_options(split, tile, "BS", "BE")}
        logits_kernel[grid](x_SM, weight_EM, out_SE, S, M, E, **launch)
    return out_SE


def dx(dlogits: Tensor, weight_EM: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute dlogits·W, [S, M].

    dlogits is [S, E]; with bfloat16 W also [summands, S, E or padded], bfloat16 tensors that add up to it.
    """
    weight_EM = weight_EM.contiguous()
    S, (E, M) = dlogits.shape[-2], weight_EM.shape
    dx_SM = torch.empty((S, M), dtype=dtype, device=dlogits.device)
    if dx_SM.numel():
        dlogits, split, summed = _summands(dlogits, weight_EM.dtype)
        table, stride = generation_of(dx_SM.device), dlogits.shape[2]
        tile = product_tile("dx", summed or split, table, S, E, M % 128 == 0)
        rows, groups = triton.cdiv(S, tile.rows), triton.cdiv(M, tile.columns)
        whole = is_whole(len(dlogits), stride, M, tile, table)
        if whole:  # fill the GPU a few times over
            groups = min(groups, triton.cdiv(4 * _MULTIPROCESSORS, rows))
        even = E % tile.depth == 0 and M % tile.columns == 0
        launch = {"EVEN": even, "SUMMANDS": len(dlogits), "WHOLE": whole, **launch_options(split, tile, "BS", "BM")}
        dx_kernel[(rows * groups,)](dlogits, weight_EM, dx_SM, S, M, E, stride, S * stride, groups, **launch)
    return dx_SM


def is_whole(summands: int, stride: int, M: int, tile: Tile, capability: Capability | None) -> bool:
    """Return whether each program of `dx_kernel` loads its dlogits once and loops over columns of W."""
    fits = stride <= tile.depth and M % tile.columns == 0
    return summands == 2 and fits and (capability is None or capability < BLACKWELL)


def dw(dlogits: Tensor, x_SM: Tensor, dtype: torch.dtype, experts: int) -> Tensor:
    """Compute dlogitsᵀ·x, [E, M]; dlogits as for `dx`. Deterministic: tokens are summed in parts, in a fixed order."""
    x_SM = x_SM.contiguous()
    (S, M), E = x_SM.shape, experts
    if S == 0:
        return torch.zeros((E, M), dtype=dtype, device=x_SM.device)
    dlogits, split, summed = _summands(dlogits, x_SM.dtype)
    tile = product_tile("dw", summed or split, generation_of(x_SM.device), S, E, M % 128 == 0)
    tiles = triton.cdiv(E, tile.rows) * triton.cdiv(M, tile.columns)
    programs = _MULTIPROCESSORS if tile.columns == 256 else _PROGRAMS
    steps = triton.cdiv(S, tile.depth)
    part_rows = triton.cdiv(steps, min(max(programs // tiles, 1), steps)) * tile.depth
    parts, stride = triton.cdiv(S, part_rows), dlogits.shape[2]
    dw_EM = torch.empty((E, M), dtype=dtype, device=x_SM.device)
    out = dw_EM if parts == 1 else torch.empty((1, parts, E * M), dtype=torch.float32, device=x_SM.device)
    even = E % tile.rows == 0 and M % tile.columns == 0
    launch = {"EVEN": even, "SUMMANDS": len(dlogits), **launch_options(split, tile, "BE", "BM")}
    dw_kernel[(tiles, parts)](dlogits, x_SM, out, S, M, E, part_rows, stride, S * stride, **launch)
    if parts > 1:
        sum_of_parts(out, dw_EM)
    return dw_EM


def sum_of_parts(parts: Tensor, *results: Tensor) -> None:
    """Reduce float32 parts [sums, …, rows, columns] over rows; split the sums evenly over the results."""
    rows, columns = parts.shape[-2:]
    first, second = results[0], results[-1]
    block, sums = block_of_parts(rows), parts.numel() // (rows * columns)
    if sums > _MAX_SUMS:  # short sequences, with separate sums each
        for whole, result in zip(parts.view(len(results), -1, rows, columns), results, strict=True):
            pieces = whole.split(_MAX_SUMS), result.view(-1, columns).split(_MAX_SUMS)
            for piece, own in zip(*pieces, strict=True):
                sum_of_parts(piece, own)
        return
    grid = (triton.cdiv(columns, block["COLUMNS"]), sums)
    sum_kernel[grid](parts, first, second, rows, columns, sums // len(results), **block, num_warps=8)


def block_of_parts(rows: int) -> dict[str, int]:
    at_once = min(triton.next_power_of_2(rows), 512)
    return {"ROWS": at_once, "COLUMNS": _SUMMED // max(at_once, 4)}


def empty_summands(tokens: int, experts: int, device: torch.device) -> Tensor:
    return torch.empty(summands_shape(tokens, experts), dtype=torch.bfloat16, device=device)


def _summands(dlogits: Tensor, other: torch.dtype) -> tuple[Tensor, str, str]:
    """Return dlogits as [SUMMANDS, S, E], the `SPLIT` of its GEMM with `other`, and "summed" if SUMMANDS > 1."""
    # Split once, in memory: both summands have the size of float32 and reach the tensor cores without registers.
    if dlogits.dim() == 3:
        return dlogits, "", "summed"
    split = operand_to_split(dlogits.dtype, other)
    if split != "a":
        return dlogits.contiguous()[None], split, ""
    dlogits, (S, E) = dlogits.contiguous(), dlogits.shape
    both = empty_summands(S, E, dlogits.device)
    count, stride = both[0].numel(), both.shape[2]
    grid, padded = (triton.cdiv(count, _BLOCK),), stride != E
    summands_kernel[grid](dlogits, both, count, E, stride, count, PADDED=padded, BLOCK=_BLOCK, num_warps=4)
    return both, "", "summed"


def launch_options(split: str, tile: Tile, rows: str, columns: str) -> dict[str, Any]:
    return {
        "SPLIT": split,
        "INTERPRET": INTERPRET,
        rows: tile.rows,
        columns: tile.columns,
        "BK": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
