"""Tile shapes of the gate's kernels. They follow from ahead-of-time compiles (registers, spills, shared memory), which
the tests repeat for every entry; none has been timed."""

from __future__ import annotations

from typing import NamedTuple

Capability = tuple[int, int]
# Compute capabilities that stand for the generations of GPUs that the tables know.
GENERATIONS: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
_BLACKWELL = (10, 0)


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


def product_tile(operation: str, apart: str, capability: Capability | None) -> Tile:
    """For one of the router's products.

    Args:
        operation: "logits", "dx" or "dw".
        apart: how operands are taken apart (`product.taken_apart`).
        capability: of the GPU; None for the interpreter, which pays for programs and steps, not for their size.
    """
    if capability is None:
        return Tile(64, 256, 128, 4, 1)
    if operation == "logits":
        if apart == "both":
            return Tile(64, 64, 32, 8, 3)
        return Tile(64, 128, 32, 8, 3) if apart else Tile(128, 128, 64, 8, 3)
    if apart == "both":
        return Tile(64, 64, 32, 8, 2)
    if capability >= _BLACKWELL:
        return Tile(64, 128, 32 if operation == "dx" else 64, 8, 2)
    return Tile(128 if operation == "dx" else 64, 128, 32, 8, 2)


def fused_tile(experts: int, apart: str, capability: Capability | None) -> Tile | None:
    """For logits made and used in one program; None where they are too many for its registers."""
    columns = width(experts)
    if capability is None:
        return Tile(64, columns, 128, 4, 1)
    # Rows of logits that are no multiple of 16 take more registers: they come and go by single numbers.
    ragged = experts % 16 != 0
    if ragged and (columns > 128 or columns == 128 and apart == "both"):
        return None
    if apart:
        return Tile(64, columns, 32, 8, 3) if columns <= 128 else None
    # Blackwell's products give a thread a whole row, which reductions like but registers do not.
    if capability >= _BLACKWELL:
        return Tile(64, columns, 64, 4 if columns <= 64 else 8, 3) if columns <= 128 else None
    return Tile(64, columns, 64, 8 if columns > (64 if ragged else 128) else 4, 3) if columns <= 256 else None


def rowwise_tile(experts: int, capability: Capability | None) -> Tile:
    """For logits that are given, and for their gradient."""
    if capability is None:
        return Tile(64, width(experts), 16, 4, 1)
    return Tile(min(64, 4096 // width(experts)), width(experts), 16, 8, 1)
