"""Tile shapes of the grouped products: what may be chosen, and what is chosen without tuning.

The table follows from ahead-of-time compiles (registers, spills, shared memory) for sm_80, sm_90 and sm_100; every
entry is compiled again by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """Tile of the result (rows × columns), depth of a step, and how a program is laid out.

    Attributes:
        bm, bn, bk: for matrix gradients, bm × bn is the tile of the matrix and bk the rows of a step.
        warps, stages: of a program, and of its software pipeline.
        group: row tiles of a band (see `swizzle`).
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8


OPERATIONS = ("up", "down", "dhidden", "dinput", "dweight")

# On Hopper and later: large tiles first, since operands are shared through the L2 cache only.
_HOPPER = {
    "up": (Config(128, 128, 64, 8, 3), Config(128, 256, 64, 8, 3), Config(64, 256, 64, 8, 3)),
    "down": (Config(128, 256, 64, 8, 3), Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "dhidden": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    "dinput": (Config(128, 256, 64, 8, 3), Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "dweight": (Config(128, 256, 64, 8, 3), Config(128, 256, 64, 8, 4), Config(128, 128, 64, 8, 3)),
}
_AMPERE = {
    "up": (Config(128, 128, 64, 8, 3), Config(64, 256, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "down": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "dhidden": (Config(64, 128, 64, 8, 3), Config(128, 128, 64, 8, 3)),
    "dinput": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "dweight": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
}
# Full float32 products run on the ordinary cores, where a program's registers are soon full.
_FLOAT32 = {operation: (Config(64, 64, 16, 4, 2),) for operation in OPERATIONS}
# The interpreter pays for programs and steps, not for their size.
_INTERPRETER = {operation: (Config(32, 64, 32, 4, 1, 4),) for operation in OPERATIONS}


def candidates(operation: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> tuple[Config, ...]:
    """The configurations that may serve, the default first.

    Args:
        operation: one of `OPERATIONS`.
        capability: of the GPU; None for the interpreter.
    """
    if capability is None:
        return _INTERPRETER[operation]
    if dtype == torch.float32:
        return _FLOAT32[operation]
    return (_HOPPER if capability >= (9, 0) else _AMPERE)[operation]
