"""The products of a layer as a model of their time sees them: how many tiles of what there are."""

from __future__ import annotations

import math
from typing import NamedTuple

from bench.gpu.shapes import Shape

_HALF = 2  # bytes of a bfloat16
#: By the names that results have.
PRODUCTS = ("up", "down", "dhidden", "dinput", "dW1", "dW2")


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int  # of a step


class Work(NamedTuple):
    """One operation at one shape.

    Attributes:
        depth: of the product. Of the matrices' gradients it is an expert's rows, and counts are of its mean.
        height, width: of the product of one expert; of rows the height is the mean.
        ragged: whether the height is that of rows, which leave tiles that are not full.
        epilogue_bytes: that are read and written at the end for each element of the product.
        activation: whether each element's is computed at the end; of a gated one each pair's.
    """

    operation: str
    experts: int
    depth: float
    height: float
    width: int
    ragged: bool
    epilogue_bytes: float
    activation: bool = False

    def tiles(self, tile: Tile) -> float:
        """Of all experts. A ragged height ends inside a tile, half of it empty on average."""
        high = self.height / tile.rows + 0.5 if self.ragged else math.ceil(self.height / tile.rows)
        return self.experts * high * math.ceil(self.width / tile.columns)

    def steps(self, tile: Tile) -> float:
        return math.ceil(self.depth / tile.depth) if self.ragged else self.depth / tile.depth + 0.5


def work(operation: str, shape: Shape) -> Work:
    """Of a layer with SwiGLU, routed evenly."""
    E, M, H, rows = shape.E, shape.M, shape.H, shape.rows / shape.E
    return {
        # Both halves of H, and A: three elements for two columns of the product.
        "up": Work("up", E, M, rows, 2 * H, True, 1.5 * _HALF, activation=True),
        "down": Work("down", E, H, rows, M, True, _HALF),
        # Both halves of H are read, those of dH written, and A.
        "dhidden": Work("dhidden", E, M, rows, H, True, 5 * _HALF, activation=True),
        "dinput": Work("dinput", E, 2 * H, rows, M, True, _HALF),
        "dW1": Work("dW1", E, rows, 2 * H, M, False, _HALF),
        "dW2": Work("dW2", E, rows, M, H, False, _HALF),
    }[operation]
