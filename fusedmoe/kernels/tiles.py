"""Row tiles: rows of ragged groups are cut for a grid whose size is known without asking the device.

A launch makes them (`triton/tiles.py`), but of rows that come from other ranks: there the launch that reads what comes
does (`triton/one_sided/plan.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    """`table`: [tiles, 2] int32, expert and first row of every tile, expert -1 where there is none; `used`: [1] int32,
    how many there are."""

    table: Tensor
    used: Tensor


def tile_bound(rows: int, experts: int, block_rows: int) -> int:
    """Tiles that `rows` rows of `experts` experts can make at most."""
    return rows // block_rows + experts


def define_tiles(counts: list[int], rows: int, block_rows: int) -> list[list[int]]:
    """Expert and first row of every tile, expert -1 where there is none, as plain loops.

    A tile is up to `block_rows` rows of one expert.

    Worked example, tiles of 4 rows, counts [5, 0, 3]: expert 0 has rows 0–3 and 4, expert 2 rows 5–7; the table is
    [[0, 0], [0, 4], [2, 5], [-1, 0], [-1, 0]].
    """
    # The bound holds however rows are spread, so a grid of that size needs no count from the device.
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [[expert, row] for row in range(start, start + count, block_rows)]
        start += count
    return tiles + [[-1, 0]] * (tile_bound(rows, len(counts), block_rows) - len(tiles))
