"""The order of tiles, and what a tile is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def place(tile, n_row_tiles, n_col_tiles, GROUP: gl.constexpr):
    """Row and column tile: bands of GROUP row tiles, so that a band's operands stay in the L2 cache."""
    band = GROUP * n_col_tiles
    first = (tile // band) * GROUP
    height = gl.minimum(n_row_tiles - first, GROUP)
    return first + (tile % band) % height, (tile % band) // height


@gluon.jit
def tiles_in(table):
    """Returns the number of tiles. Programs walk them: from their own number on, in steps of as many as there are."""
    _, _, n_row_tiles, n_col_tiles = table
    return n_row_tiles * n_col_tiles


@gluon.jit
def locate(tile, table, GROUP: gl.constexpr):
    """Expert of a tile, its first row, the end of the expert's rows, and its column tile."""
    tiles_ptr, ends_ptr, n_row_tiles, n_col_tiles = table
    row_tile, col_tile = place(tile, n_row_tiles, n_col_tiles, GROUP)
    expert = gl.load(tiles_ptr + 2 * row_tile)
    start = gl.load(tiles_ptr + 2 * row_tile + 1)
    return expert, start, gl.load(ends_ptr + expert), col_tile
