"""Tile shapes of the grouped products: what may be chosen, and what is chosen without tuning.

The tables follow from ahead-of-time compiles (registers, spills, shared memory) for sm_80, sm_90 and sm_100; every
entry is compiled again by the tests, that of sm_80 for sm_120 too. `generation.py` says which table serves a device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from fusedmoe.kernels.generation import BLACKWELL, HOPPER, Capability
from fusedmoe.kernels.triton.jit import MOST_REGISTERS

OPERATIONS = ("up", "down", "dhidden", "dinput", "dw1", "dw2")


@dataclass(frozen=True)
class Config:
    """Tile of the result (rows × columns), depth of a step, and how a program is laid out.

    Attributes:
        bm, bn, bk: for matrix gradients, bm × bn is the tile of the matrix and bk the rows of a step.
        warps, stages: of a program, and of its software pipeline.
        group: row tiles of a band (see `swizzle`).
        registers: that a thread may have, 0 where the assembler decides, which spills a few bytes where that lets one
            more program onto a multiprocessor.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    registers: int = 0

    def __str__(self) -> str:
        shape = f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages} g{self.group}"
        return shape + f" r{self.registers}" * bool(self.registers)

    @property
    def options(self) -> dict[str, int]:
        """Options for Triton's compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return {**options, "maxnreg": self.registers} if self.registers else options


@dataclass(frozen=True)
class HopperConfig(Config):
    """A tile of the Gluon form: of a program four warps load, and two groups of four multiply half of the rows each.

    Attributes:
        pingpong: the groups take whole tiles by turns instead, so that one multiplies while the other stores.
        registers: that a thread has at launch; those that multiply take more, and those that load give some up.
        programs: that there are, each of which computes one tile after the other; 0: one a multiprocessor.
    """

    warps: int = 4
    stages: int = 4
    registers: int = 168
    pingpong: bool = False
    programs: int = 0

    def __str__(self) -> str:
        turns = " by turns" * self.pingpong
        return f"gluon {super().__str__()}{turns}" + f" p{self.programs}" * bool(self.programs)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


def with_programs(config: Config, programs: int) -> Config:
    """Returns a configuration of the Gluon form with so many programs; others as they are."""
    return replace(config, programs=programs) if isinstance(config, HopperConfig) else config


class Candidate(NamedTuple):
    """A configuration that may serve, and from how many rows of an expert and what depth on it does without tuning."""

    config: Config
    rows: int = 0
    depth: int = 0


class Variant(NamedTuple):
    """A launch as far as it decides which code is compiled.

    Attributes:
        operation: one of `OPERATIONS`.
        dtype: of all operands, e.g. "bfloat16"; precision: of float32 products, "ieee" or "tf32".
        activation: its name where the operation has one, else "".
        gather: whether rows are looked up; extra: whether there is a bias (up, down), a router weight (dhidden) or a
            sum to add to (dw1, dw2).
        even: whether sizes are such that whole blocks are read without masks (see `is_even`).
        bulk: whether operands come by bulk copies.
    """

    operation: str
    dtype: str
    precision: str
    activation: str
    gather: bool
    extra: bool
    even: bool
    bulk: bool

    def __str__(self) -> str:
        flags = [name for name in ("gather", "extra", "even", "bulk") if getattr(self, name)]
        return " ".join(filter(None, [*self[:4], *flags]))


class Key(NamedTuple):
    """The facts that the choice of a configuration depends on.

    Attributes:
        depth, columns: of the expert's matrix; for matrix gradients both its sides.
        rows: of an expert, the power of two not above their mean, so that not every step has a key of its own.
        shared: communication holds some multiprocessors meanwhile.
    """

    variant: Variant
    depth: int
    columns: int
    experts: int
    rows: int
    shared: bool = False

    @property
    def flops(self) -> int:
        """Roughly: a gated activation has twice as many."""
        return 2 * self.experts * self.rows * self.depth * self.columns

    def __str__(self) -> str:
        sizes = f"depth={self.depth} columns={self.columns} experts={self.experts} rows={self.rows}"
        return f"{self.variant} {sizes}" + " shared" * self.shared


def bucket(rows: int, experts: int) -> int:
    """`Key.rows` of so many rows of all experts."""
    return 1 << max(rows // max(experts, 1), 1).bit_length() - 1


def is_even(depth: int, columns: int, dtype: torch.dtype) -> bool:
    """Returns whether no block ends inside a step and every row starts where bulk and vector copies can, as usual."""
    return depth % (64 if dtype.itemsize <= 2 else 32) == 0 and columns % 16 == 0


def has_bulk_copies(capability: Capability) -> bool:
    return capability >= HOPPER


# Large tiles first: operands are shared through the L2 cache only. Four stages of 128x256 fill the shared memory; such
# programs are alone on their multiprocessor, while 128x128 and below leave room for a second one, which computes while
# the first one stores. The order is that of an H100 at the benchmark's shapes.
_WIDE = Config(128, 256, 64, 8, 4)
_WIDE_3 = Config(128, 256, 64, 8, 3)
_TALL = Config(256, 128, 64, 8, 4)
_TALL_3 = Config(256, 128, 64, 8, 3)
_SQUARE = Config(128, 128, 64, 8, 3)
_FLAT = Config(64, 256, 64, 8, 3)
_FLAT_4 = Config(64, 256, 64, 4, 4)
_HALF = Config(64, 128, 64, 8, 3)
_SMALL = Config(64, 128, 64, 4, 3)

_LARGE_FIRST = (
    Candidate(_WIDE, rows=128, depth=512),
    Candidate(_SQUARE, rows=128),
    Candidate(_FLAT_4, rows=64),
    Candidate(_SMALL),
    Candidate(_WIDE_3),
)
_HOPPER = {
    "up": _LARGE_FIRST,
    "down": _LARGE_FIRST,
    "dhidden": (Candidate(_WIDE_3, rows=128), Candidate(_HALF), Candidate(_SQUARE), Candidate(_SMALL)),
    "dinput": _LARGE_FIRST,
    "dw1": (Candidate(_TALL_3, rows=1024), Candidate(_SQUARE), Candidate(_TALL), Candidate(_WIDE_3)),
    "dw2": (Candidate(_WIDE, rows=1024), Candidate(_SQUARE), Candidate(_WIDE_3)),
}
_BLACKWELL = {
    **_HOPPER,
    "dhidden": (Candidate(_SQUARE, rows=1024), Candidate(replace(_HALF, registers=MOST_REGISTERS)), Candidate(_FLAT)),
}
# Without bulk copies addresses take registers.
_ROWS_AMPERE = (Candidate(_SQUARE, rows=256), Candidate(_SMALL))
_MATRIX_AMPERE = (Candidate(_SQUARE), Candidate(_SMALL))
_AMPERE = {
    "up": (*_ROWS_AMPERE, Candidate(_FLAT)),
    "down": _ROWS_AMPERE,
    "dhidden": (Candidate(_HALF), Candidate(_SQUARE)),
    "dinput": _ROWS_AMPERE,
    "dw1": _MATRIX_AMPERE,
    "dw2": _MATRIX_AMPERE,
}
# Sizes that are not even: masks everywhere, and rows that start at odd addresses.
_RAGGED = (Candidate(Config(64, 64, 32, 8, 3, registers=MOST_REGISTERS)),)
# Full float32 products run on the ordinary cores, where a program's registers are soon full.
_FLOAT32 = (Candidate(Config(64, 64, 16, 4, 2, registers=MOST_REGISTERS)),)
_FLOAT32_RAGGED = (Candidate(Config(32, 64, 16, 4, 2, registers=MOST_REGISTERS)),)
# The interpreter pays for programs and steps, not for their size.
_INTERPRETER = (Candidate(Config(32, 64, 32, 4, 1, 4)),)


def candidates(
    operation: str, dtype: torch.dtype, capability: Capability | None, even: bool = True
) -> tuple[Candidate, ...]:
    """The configurations that may serve.

    Args:
        operation: one of `OPERATIONS`.
        capability: generation of the GPU; None for the interpreter.
        even: as in `Variant`.
    """
    if capability is None:
        return _INTERPRETER
    if dtype == torch.float32:
        return _FLOAT32 if even else _FLOAT32_RAGGED
    if not even:
        return _RAGGED
    if capability >= BLACKWELL:
        return _BLACKWELL[operation]
    return (_HOPPER if capability >= HOPPER else _AMPERE)[operation]


@cache
def row_heights(dtype: torch.dtype, capability: Capability | None) -> tuple[int, ...]:
    """Rows of a tile in all configurations that products of rows may have by the table."""
    operations = (operation for operation in OPERATIONS if not operation.startswith("dw"))
    choices = [candidates(of, dtype, capability, even) for of in operations for even in (False, True)]
    return tuple(sorted({one.config.bm for some in choices for one in some}))


# Of the Gluon form. Which ones there are, and their order, is by an H200 and an H100 at the benchmark's shapes.
_GLUON_WIDE = HopperConfig(128, 256, 64)
# Room for two boxes of results of each group, so that neither waits for the other to be stored; or for one more step.
_GLUON_TURNS = HopperConfig(128, 128, 64, stages=5, pingpong=True)
_GLUON_TURNS_6 = HopperConfig(128, 128, 64, stages=6, pingpong=True)
# Of W1's gradient: bands so high that 132 tiles are about a square, or half as many columns that are looked up.
_GLUON_MATRIX = HopperConfig(128, 256, 64, group=16)
_GLUON_TALL = HopperConfig(256, 128, 64)
# Where a tile has few steps its end counts.
_GLUON_ROWS = (Candidate(_GLUON_WIDE, depth=768), Candidate(_GLUON_TURNS), Candidate(_GLUON_TURNS_6))
_GLUON = {
    "up": (Candidate(_GLUON_WIDE),),
    "down": _GLUON_ROWS,
    "dhidden": (Candidate(_GLUON_WIDE),),
    "dinput": _GLUON_ROWS,
    "dw1": (Candidate(_GLUON_MATRIX), Candidate(_GLUON_TALL)),
    "dw2": (Candidate(_GLUON_WIDE),),
}


def gluon_candidates(variant: Variant, capability: Capability | None) -> tuple[Candidate, ...]:
    """Configurations of the Gluon form, which serve where they are verified and fastest: on Hopper, in half precision,
    of sizes that are even, and looking rows up, but for products of rows that are sorted. None where the environment
    variable FUSEDMOE_GLUON is 0."""
    if capability != HOPPER or os.environ.get("FUSEDMOE_GLUON") == "0":
        return ()
    if not variant.bulk or variant.dtype == "float32":
        return ()
    return _GLUON[variant.operation] if variant.gather or variant.operation in ("down", "dinput") else ()


def by_shape(choices: Sequence[Candidate], rows: int, depth: int) -> list[Config]:
    """The configurations of `choices`, those that suit the shape first: the first one serves without tuning. Last come
    those of the Gluon form, which serve where they have been timed."""

    def order(one: Candidate) -> tuple[bool, bool]:
        return isinstance(one.config, HopperConfig), one.rows > rows or one.depth > depth

    return [one.config for one in sorted(choices, key=order)]
