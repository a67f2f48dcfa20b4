"""Row tiles on the device; references: `define_tiles` and `define_arrival_order` in `fusedmoe/kernels/tiles.py`.

N rows of E experts form at most N // BM + E tiles of up to BM rows. The grid has that size and unused programs exit at
once, so the host need not know the counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.one_sided import Wait
from fusedmoe.kernels.tiles import Tiles, tile_bound
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit

# Comparisons per program: each of its tiles with the ends of all experts.
_COMPARISONS = 4096
# Tiles that a program sorts, and tiles that it compares at a time.
_SORTED, _COMPARED = 16, 128


@triton.jit
def find_tiles(start_E, count_E, tile, E, BM: tl.constexpr, EP: tl.constexpr):
    """Return each row tile's expert (-1 if unused) and first row, and the number of tiles used."""
    e = tl.arange(0, EP)
    end_E = tl.cumsum((count_E + BM - 1) // BM, 0)
    # Number of experts whose tiles all precede this one, empty experts included.
    before = (e < E)[None, :] & (end_E[None, :] <= tile[:, None])
    expert = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, end_E[None, :], 0), 1)
    start = tl.sum(tl.where(e[None, :] == expert[:, None], start_E[None, :], 0), 1) + (tile - first) * BM
    used = expert < E
    return tl.where(used, expert, -1), tl.where(used, start, 0), tl.max(end_E, 0)


@jit(do_not_specialize=["n_tiles"])
def tiles_kernel(offsets_ptr, tiles_ptr, used_ptr, n_tiles, E, BM: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    e = tl.arange(0, EP)
    start_E = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count_E = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - start_E
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    expert, start, used = find_tiles(start_E, count_E, tile, E, BM, EP)
    tl.store(tiles_ptr + 2 * tile, expert, mask=tile < n_tiles)
    tl.store(tiles_ptr + 2 * tile + 1, start, mask=tile < n_tiles)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, used)


def make_tiles(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
    """Cut up to `rows` rows sorted by expert into tiles of `block_rows` rows."""
    experts = offsets_E1.numel() - 1
    n_tiles = tile_bound(rows, experts, block_rows)
    # After the count, the table is 16-byte aligned as the kernels assume.
    numbers = offsets_E1.new_empty(4 + 2 * n_tiles)
    tiles = Tiles(numbers[4:].view(n_tiles, 2), numbers[:1])
    padded, block = block_sizes(experts)
    tiles_kernel[(triton.cdiv(n_tiles, block),)](
        offsets_E1, *tiles, n_tiles, experts, BM=block_rows, BT=block, EP=padded, num_warps=4, maxnreg=MAX_REGISTERS
    )
    return tiles


@triton.jit
def _last_signal(tiles_ptr, ends_ptr, source_ptr, tile, n_tiles, SIGNALS, BM: tl.constexpr, ROWS: tl.constexpr):
    """Return the position, among its source's signals, of the signal of each tile's last row."""
    inside = tile < n_tiles
    expert = tl.load(tiles_ptr + 2 * tile, mask=inside, other=-1)
    used = expert >= 0
    start = tl.load(tiles_ptr + 2 * tile + 1, mask=used, other=0)
    last = tl.minimum(start + BM, tl.load(ends_ptr + expert, mask=used, other=1)) - 1
    signal = (tl.load(source_ptr + last, mask=used, other=0) // ROWS % SIGNALS).to(tl.int32)
    return tl.where(used, signal, SIGNALS)


@jit(do_not_specialize=["n_tiles"])
def sort_tiles_kernel(
    tiles_ptr, ends_ptr, source_ptr, sorted_ptr, n_tiles, SIGNALS,
    BM: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    own = _last_signal(tiles_ptr, ends_ptr, source_ptr, tile, n_tiles, SIGNALS, BM, ROWS)
    place = tile * 0
    for first in range(0, n_tiles, BLOCK):
        others = first + tl.arange(0, BLOCK)
        signal = _last_signal(tiles_ptr, ends_ptr, source_ptr, others, n_tiles, SIGNALS, BM, ROWS)
        precedes = (signal[None, :] < own[:, None]) | (
            (signal[None, :] == own[:, None]) & (others[None, :] < tile[:, None])
        )
        place += tl.sum((precedes & (others < n_tiles)[None, :]).to(tl.int32), 1)
    inside = tile < n_tiles
    tl.store(sorted_ptr + 2 * place, tl.load(tiles_ptr + 2 * tile, mask=inside), mask=inside)
    tl.store(sorted_ptr + 2 * place + 1, tl.load(tiles_ptr + 2 * tile + 1, mask=inside), mask=inside)


def sort_tiles(tiles: Tiles, ends_E: Tensor, source_N: Tensor, block_rows: int, wait: Wait) -> Tiles:
    """Sort row tiles by the last signal they wait for (`define_arrival_order`)."""
    table, n_tiles = torch.empty_like(tiles.table), len(tiles.table)
    sort_tiles_kernel[(triton.cdiv(n_tiles, _SORTED),)](
        tiles.table, ends_E, source_N, table, n_tiles, wait.signals.shape[-1],
        BM=block_rows, ROWS=wait.tile, BT=_SORTED, BLOCK=_COMPARED, num_warps=4,
    )  # fmt: skip
    return Tiles(table, tiles.used)


def block_sizes(experts: int) -> tuple[int, int]:
    padded = triton.next_power_of_2(experts)
    return padded, min(128, max(1, _COMPARISONS // padded))
