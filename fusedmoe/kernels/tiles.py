"""Row tiles of ragged groups, in a table whose size is known without a device synchronization."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    """Row tiles: `table` [tiles, 2] int32 (expert, first row), expert -1 if unused; `used` [1] int32, tiles in use."""

    table: Tensor
    used: Tensor


def tile_bound(rows: int, experts: int, block_rows: int) -> int:
    return rows // block_rows + experts


def define_tiles(counts: list[int], rows: int, block_rows: int) -> list[list[int]]:
    """List (expert, first row) of each tile of up to `block_rows` rows of one expert; (-1, 0) if unused.

    Example, tiles of 4 rows, counts [5, 0, 3]: the table is [[0, 0], [0, 4], [2, 5], [-1, 0], [-1, 0]].
    """
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [[expert, row] for row in range(start, start + count, block_rows)]
        start += count
    return tiles + [[-1, 0]] * (tile_bound(rows, len(counts), block_rows) - len(tiles))


def define_arrival_order(
    table: list[list[int]], ends: list[int], source: list[int], block_rows: int, rows_per_signal: int, signals: int
) -> list[list[int]]:
    """Sort row tiles by the last signal they wait for, if their rows are sorted by arrival. Unused tiles are last.

    Args:
        ends: end of each expert's rows.
        source: index of each row in the receive buffer, which has one signal per `rows_per_signal` rows.
        signals: number of signals per source rank.
    """

    def last_signal(tile: list[int]) -> int:
        expert, start = tile
        last = min(start + block_rows, ends[expert]) - 1
        return signals if expert < 0 else source[last] // rows_per_signal % signals

    return sorted(table, key=last_signal)
