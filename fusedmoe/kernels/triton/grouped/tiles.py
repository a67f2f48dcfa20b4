"""Row tiles: how the rows of ragged groups are cut for a grid whose size is known without asking the device.

A tile is up to BM rows of one expert. N rows of E experts make at most N // BM + E tiles, however they are spread; the
grid has that many, and those without rows end at once. So nothing waits for the host to learn the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.grouped import tile_bound
from fusedmoe.kernels.triton.jit import jit

# Comparisons of a program: each of its tiles looks through the ends of all experts.
_COMPARISONS = 8192


@jit(do_not_specialize=["n_tiles"])
def tiles_kernel(offsets_ptr, tiles_ptr, used_ptr, n_tiles, E, BM: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    e = tl.arange(0, EP)
    known = e < E
    start_E = tl.load(offsets_ptr + e, mask=known, other=0)
    count_E = tl.load(offsets_ptr + e + 1, mask=known, other=0) - start_E
    end_E = tl.cumsum((count_E + BM - 1) // BM, 0)

    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    # Experts whose tiles all come before. They are counted, the empty ones too, so that runs of those are skipped.
    before = known[None, :] & (end_E[None, :] <= tile[:, None])
    expert = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, end_E[None, :], 0), 1)
    start = tl.load(offsets_ptr + expert) + (tile - first) * BM  # offsets end with the number of rows: E is inside
    used = expert < E
    tl.store(tiles_ptr + 2 * tile, tl.where(used, expert, -1), mask=tile < n_tiles)
    tl.store(tiles_ptr + 2 * tile + 1, tl.where(used, start, 0), mask=tile < n_tiles)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, tl.max(end_E, 0))


class Tiles(NamedTuple):
    """`table`: [tiles, 2] int32, expert and first row of every tile, expert -1 where there is none; `used`: [1] int32,
    how many there are."""

    table: Tensor
    used: Tensor


def make_tiles(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
    """The tiles of rows sorted by expert. No host synchronisation.

    Args:
        offsets_E1: int32, first row of each expert and, last, the number of rows.
        rows: a bound on that number.
    """
    experts = offsets_E1.numel() - 1
    n_tiles = tile_bound(rows, experts, block_rows)
    # The number comes first, and the table where 16 bytes align it: kernels are compiled for that.
    numbers = offsets_E1.new_empty(4 + 2 * n_tiles)
    tiles = Tiles(numbers[4:].view(n_tiles, 2), numbers[:1])
    padded, block = block_sizes(experts)
    tiles_kernel[(triton.cdiv(n_tiles, block),)](
        offsets_E1, tiles.table, tiles.used, n_tiles, experts, BM=block_rows, BT=block, EP=padded, num_warps=4
    )
    return tiles


def block_sizes(experts: int) -> tuple[int, int]:
    """Experts as a power of two, and tiles of a program."""
    padded = triton.next_power_of_2(experts)
    return padded, min(128, max(1, _COMPARISONS // padded))
