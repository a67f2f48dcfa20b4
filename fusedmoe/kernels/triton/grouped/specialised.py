"""The product of rows with their expert's matrix once more, for Hopper: persistent programs with specialised warps.

One warp group copies operands, two multiply; a program goes from tile to tile, so that copies for the next tile go on
while the last one is stored. Triton's compiler makes such a program in this form only: four warps, descriptors made on
the device, no condition around the body of the loop. Hence the number of tiles that have rows comes from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.triton.grouped.call import GroupedCall, constants
from fusedmoe.kernels.triton.grouped.configs import Config, Variant
from fusedmoe.kernels.triton.grouped.device import mac, swizzle
from fusedmoe.kernels.triton.jit import jit


@jit(do_not_specialize=["rows", "E", "bias_start", "bias_columns"])
def specialised_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    used_ptr,
    ends_ptr,
    rows,
    E,
    K,
    N,
    bias_start,
    bias_columns,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """K is a whole number of steps."""
    a = tl.make_tensor_descriptor(a_ptr, [rows, K], [K, 1], [BM, BK])
    if TRANSPOSED:
        b = tl.make_tensor_descriptor(b_ptr, [E * N, K], [K, 1], [BN, BK])
    else:
        b = tl.make_tensor_descriptor(b_ptr, [E * K, N], [N, 1], [BK, BN])
    n_row_tiles = tl.load(used_ptr)
    n_col_tiles = tl.cdiv(N, BN)
    n_tiles = n_row_tiles * n_col_tiles
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), warp_specialize=not INTERPRET, flatten=False):
        row_tile, col_tile = swizzle(tile, n_row_tiles, n_col_tiles, GROUP)
        expert = tl.load(tiles_ptr + 2 * row_tile)
        start = tl.load(tiles_ptr + 2 * row_tile + 1)
        end = tl.load(ends_ptr + expert)
        n0 = col_tile * BN

        # Tiles may run into the next expert's rows and columns, whose results are not stored.
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, K, BK):
            a_tile = a.load([start, k0])
            if TRANSPOSED:
                b_tile = b.load([expert * N + n0, k0]).T
            else:
                b_tile = b.load([expert * K + k0, n0])
            acc = mac(a_tile, b_tile, acc, PRECISION, INTERPRET)

        row = start + tl.arange(0, BM)
        n = n0 + tl.arange(0, BN)
        if BIAS:
            of_bias = (n >= bias_start) & (n < bias_start + bias_columns)
            bias = tl.load(bias_ptr + expert * bias_columns + n - bias_start, mask=of_bias, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        out_ptrs = out_ptr + row[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (n < N)[None, :])


def specialised_product(
    call: GroupedCall,
    variant: Variant,
    config: Config,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None,
    bias_start: int,
) -> Tensor:
    """A launch of `product` by persistent programs, in the configuration that was chosen."""
    depth, columns = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    out = a.new_empty((a.shape[0], columns))
    tiles = call.tiles(config.bm)
    programs = min(call.programs, len(tiles.table) * triton.cdiv(columns, config.bn))
    given = constants(variant, config)
    for name in ("EVEN_K", "DESCRIPTORS"):
        assert given.pop(name), "specialised programs know nothing else"

    def launch() -> None:
        specialised_kernel[(programs,)](
            a,
            b,
            bias,
            out,
            tiles.table,
            tiles.used,
            call.ends_E,
            a.shape[0],
            len(b),
            depth,
            columns,
            bias_start,
            0 if bias is None else bias.shape[1],
            TRANSPOSED=transposed,
            BIAS=variant.extra,
            **given,
        )

    with_scratch(a.device, launch)
    return out


def with_scratch(device: torch.device, launch: Callable[[], object]) -> None:
    """Launches a kernel that makes descriptors on the device: they need a little memory, for which Triton asks."""

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    # In a context of its own: an allocator that somebody else has set stays theirs.
    context = copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(launch)
