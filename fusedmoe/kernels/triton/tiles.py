"""Row tiles as kernels make them.

A tile is up to BM rows of one expert. N rows of E experts make at most N // BM + E tiles, however they are spread; the
grid has that many, and those without rows end at once. So nothing waits for the host to learn the counts. Definition:
`define_tiles` in `fusedmoe/kernels/tiles.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.tiles import Tiles, tile_bound
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit

# Comparisons of a program: each of its tiles looks through the ends of all experts.
_COMPARISONS = 4096


@triton.jit
def find_tiles(start_E, count_E, tile, E, BM: tl.constexpr, EP: tl.constexpr):
    """Expert (-1 where there is none) and first row of row tiles of BM rows; and how many there are. `start_E`: first
    row of each expert."""
    e = tl.arange(0, EP)
    end_E = tl.cumsum((count_E + BM - 1) // BM, 0)
    # Experts whose tiles all come before. They are counted, the empty ones too, so that runs of those are skipped.
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
    """Cuts up to `rows` rows sorted by expert into tiles of so many rows. No host synchronisation."""
    experts = offsets_E1.numel() - 1
    n_tiles = tile_bound(rows, experts, block_rows)
    # The number comes first, and the table where 16 bytes align it: kernels are compiled for that.
    numbers = offsets_E1.new_empty(4 + 2 * n_tiles)
    tiles = Tiles(numbers[4:].view(n_tiles, 2), numbers[:1])
    padded, block = block_sizes(experts)
    tiles_kernel[(triton.cdiv(n_tiles, block),)](
        offsets_E1, *tiles, n_tiles, experts, BM=block_rows, BT=block, EP=padded, num_warps=4, maxnreg=MOST_REGISTERS
    )
    return tiles


def block_sizes(experts: int) -> tuple[int, int]:
    """Experts as a power of two, and tiles of a program."""
    padded = triton.next_power_of_2(experts)
    return padded, min(128, max(1, _COMPARISONS // padded))
