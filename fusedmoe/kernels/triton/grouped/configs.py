"""Tile configurations of the grouped GEMMs: candidates for tuning, untuned defaults, and those verified on GPUs.

The tables follow from ahead-of-time compiles (registers, spills, shared memory) for sm_80, sm_90 and sm_100. The tests
recompile every entry, and the sm_80 table for sm_120 too.

The run-time tuner times only the configurations in `VERIFIED`. `python -m bench.gpu.verify`, a part of
`make bench-gpu`, compares every candidate with its reference and records the results in bench/results. Entries are
added here by hand, with the file of the result and its Triton version.

Results of the Gluon form hold only for the Triton versions of their evidence, because Gluon is experimental. Results of
the Triton form hold for every tested version: `make aot` compiles each configuration with each version and checks the
machine code. Untuned launches use the Triton form as well, so this table could not exclude a version that miscompiles
it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton

from fusedmoe.kernels.backend import BLACKWELL, HOPPER, Capability
from fusedmoe.kernels.triton.jit import MAX_REGISTERS

TRITON_VERSION: str = triton.__version__
OPERATIONS = ("up", "down", "dhidden", "dinput", "dw1", "dw2")


@dataclass(frozen=True)
class Config:
    """Output tile (rows × columns), depth of a K step, and program layout.

    Attributes:
        bm, bn, bk: for weight gradients, bm × bn is the tile of the matrix and bk the rows per step.
        warps, stages: warps of a program, and stages of its software pipeline.
        group: row tiles per band (see `swizzle`).
        registers: maximum per thread; 0: the assembler's choice, which spills a few bytes where that raises occupancy.
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
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return {**options, "maxnreg": self.registers} if self.registers else options


@dataclass(frozen=True)
class HopperConfig(Config):
    """Tile of the Gluon form: four warps load, and two groups of four warps multiply half of the rows each.

    Attributes:
        pingpong: the groups alternate on whole tiles: one multiplies while the other stores.
        registers: per thread at launch; then multiplying warps take more and loading warps release some.
        programs: number of persistent programs; 0: one per multiprocessor.
        copies_arrive: copies of gathered rows signal their own completion; the loading warps wait for none. `up` only.
    """

    warps: int = 4
    stages: int = 4
    registers: int = 168
    pingpong: bool = False
    programs: int = 0
    copies_arrive: bool = False

    def __str__(self) -> str:
        flags = " by turns" * self.pingpong + " copies arrive" * self.copies_arrive
        return f"gluon {super().__str__()}{flags}" + f" p{self.programs}" * bool(self.programs)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


def with_programs(config: Config, programs: int) -> Config:
    """Return a Gluon configuration with this number of programs; other configurations unchanged."""
    return replace(config, programs=programs) if isinstance(config, HopperConfig) else config


class ConfigCandidate(NamedTuple):
    """A configuration, and the rows per expert and depth from which it is the untuned default."""

    config: Config
    rows: int = 0
    depth: int = 0


class Variant(NamedTuple):
    """Properties of a launch that determine the compiled code.

    Attributes:
        dtype: of all operands, e.g. "bfloat16".
        precision: of float32 GEMMs, "ieee" or "tf32".
        activation: its name where the operation has one, else "".
        extra: there is a bias (up, down), a router weight (dhidden) or an accumulator (dw1, dw2).
        even: whole blocks are read without masks (see `is_even`).
        bulk: operands are loaded by bulk copies.
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
    """Properties of a launch that determine the choice of a configuration.

    Attributes:
        depth, columns: of the expert's matrix; for weight gradients both its sides.
        rows: mean rows per expert, rounded down to a power of two to limit the number of keys.
        shared: communication occupies some multiprocessors of the GPU.
    """

    variant: Variant
    depth: int
    columns: int
    experts: int
    rows: int
    shared: bool = False

    @property
    def flops(self) -> int:
        """Approximate: half of the true number for a gated activation."""
        return 2 * self.experts * self.rows * self.depth * self.columns

    def __str__(self) -> str:
        sizes = f"depth={self.depth} columns={self.columns} experts={self.experts} rows={self.rows}"
        return f"{self.variant} {sizes}" + " shared" * self.shared


def bucket(rows: int, experts: int) -> int:
    return 1 << max(rows // max(experts, 1), 1).bit_length() - 1


def is_even(depth: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether blocks end at step boundaries and rows are aligned for bulk and vector copies."""
    return depth % (64 if dtype.itemsize <= 2 else 32) == 0 and columns % 16 == 0


def has_bulk_copies(capability: Capability) -> bool:
    return capability >= HOPPER


# Large tiles first, because operands are shared only through the L2 cache. Four stages of 128x256 fill the shared
# memory; 128x128 and smaller leave room for a second program, which computes while the first stores. Ordered by times
# on an H100 at the benchmark's shapes.
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
    ConfigCandidate(_WIDE, rows=128, depth=512),
    ConfigCandidate(_SQUARE, rows=128),
    ConfigCandidate(_FLAT_4, rows=64),
    ConfigCandidate(_SMALL),
    ConfigCandidate(_WIDE_3),
)
_HOPPER = {
    "up": _LARGE_FIRST,
    "down": _LARGE_FIRST,
    "dhidden": (
        ConfigCandidate(_WIDE_3, rows=128),
        ConfigCandidate(_HALF),
        ConfigCandidate(_SQUARE),
        ConfigCandidate(_SMALL),
    ),
    "dinput": _LARGE_FIRST,
    "dw1": (
        ConfigCandidate(_TALL_3, rows=1024),
        ConfigCandidate(_SQUARE),
        ConfigCandidate(_TALL),
        ConfigCandidate(_WIDE_3),
    ),
    "dw2": (ConfigCandidate(_WIDE, rows=1024), ConfigCandidate(_SQUARE), ConfigCandidate(_WIDE_3)),
}
_BLACKWELL = {
    **_HOPPER,
    "dhidden": (
        ConfigCandidate(_SQUARE, rows=1024),
        ConfigCandidate(replace(_HALF, registers=MAX_REGISTERS)),
        ConfigCandidate(_FLAT),
    ),
}
# Without bulk copies addresses take registers.
_ROWS_AMPERE = (ConfigCandidate(_SQUARE, rows=256), ConfigCandidate(_SMALL))
_MATRIX_AMPERE = (ConfigCandidate(_SQUARE), ConfigCandidate(_SMALL))
_AMPERE = {
    "up": (*_ROWS_AMPERE, ConfigCandidate(_FLAT)),
    "down": _ROWS_AMPERE,
    "dhidden": (ConfigCandidate(_HALF), ConfigCandidate(_SQUARE)),
    "dinput": _ROWS_AMPERE,
    "dw1": _MATRIX_AMPERE,
    "dw2": _MATRIX_AMPERE,
}
# Sizes that are not even: masks everywhere, and unaligned rows.
_RAGGED = (ConfigCandidate(Config(64, 64, 32, 8, 3, registers=MAX_REGISTERS)),)
# float32 GEMMs run on CUDA cores and need many registers.
_FLOAT32 = (ConfigCandidate(Config(64, 64, 16, 4, 2, registers=MAX_REGISTERS)),)
_FLOAT32_RAGGED = (ConfigCandidate(Config(32, 64, 16, 4, 2, registers=MAX_REGISTERS)),)
# The interpreter's cost depends on the number of programs and steps, not on their size.
_INTERPRETER = (ConfigCandidate(Config(32, 64, 32, 4, 1, 4)),)


def candidates(
    operation: str, dtype: torch.dtype, capability: Capability | None, even: bool = True
) -> tuple[ConfigCandidate, ...]:
    """Return the candidate configurations of an operation; `capability` None is the interpreter."""
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
    """Return the row-tile heights of all candidate configurations of row GEMMs."""
    operations = (operation for operation in OPERATIONS if not operation.startswith("dw"))
    choices = [candidates(of, dtype, capability, even) for of in operations for even in (False, True)]
    return tuple(sorted({one.config.bm for some in choices for one in some}))


# The Gluon form, ordered by times on an H200 and an H100 at the benchmark's shapes.
_GLUON_WIDE = HopperConfig(128, 256, 64)
_GLUON_COPIES_ARRIVE = HopperConfig(128, 256, 64, copies_arrive=True)
# Two result boxes per group, so neither waits for the other's store; or one more stage.
_GLUON_PINGPONG = HopperConfig(128, 128, 64, stages=5, pingpong=True)
_GLUON_PINGPONG_6 = HopperConfig(128, 128, 64, stages=6, pingpong=True)
# Gradient of W1: bands of 16 row tiles make 132 concurrent tiles about square; or half the gathered columns per tile.
_GLUON_MATRIX = HopperConfig(128, 256, 64, group=16)
_GLUON_TALL = HopperConfig(256, 128, 64)
# With few steps per tile, its epilogue dominates.
_GLUON_ROWS = (
    ConfigCandidate(_GLUON_WIDE, depth=768),
    ConfigCandidate(_GLUON_PINGPONG),
    ConfigCandidate(_GLUON_PINGPONG_6),
)
_GLUON = {
    "up": (ConfigCandidate(_GLUON_WIDE), ConfigCandidate(_GLUON_COPIES_ARRIVE)),
    "down": _GLUON_ROWS,
    "dhidden": (ConfigCandidate(_GLUON_WIDE),),
    "dinput": _GLUON_ROWS,
    "dw1": (ConfigCandidate(_GLUON_MATRIX), ConfigCandidate(_GLUON_TALL)),
    "dw2": (ConfigCandidate(_GLUON_WIDE),),
}


def gluon_candidates(variant: Variant, capability: Capability | None) -> tuple[ConfigCandidate, ...]:
    """Return the candidates of the Gluon form, none if the environment variable FUSEDMOE_GLUON is 0.

    They require Hopper, half precision, even sizes, and gathered rows except for GEMMs on sorted rows.
    """
    if capability != HOPPER or os.environ.get("FUSEDMOE_GLUON") == "0":
        return ()
    if not variant.bulk or variant.dtype == "float32":
        return ()
    return _GLUON[variant.operation] if variant.gather or variant.operation in ("down", "dinput") else ()


def order_by_shape(choices: Sequence[ConfigCandidate], rows: int, depth: int) -> list[Config]:
    """Order configurations by fit to the shape, the untuned default first and Gluon forms, which need timing, last."""

    def order(one: ConfigCandidate) -> tuple[bool, bool]:
        return isinstance(one.config, HopperConfig), one.rows > rows or one.depth > depth

    return [one.config for one in sorted(choices, key=order)]


class Gpu(NamedTuple):
    """Properties of a GPU that determine which configurations it can run. `shared_bytes` is per block."""

    capability: Capability
    shared_bytes: int
    multiprocessors: int


class Verified(NamedTuple):
    """Configurations with correct results on one kind of GPU.

    Attributes:
        configs: names of configurations by prefix of the verified variants (`str(Variant)`). A name that ends in " p"
            was verified with fewer programs than tiles, as in launches overlapped with communication.
        triton: Triton versions of the evidence.
        evidence: files in bench/results with the comparisons.
    """

    capability: Capability
    shared_bytes: int
    configs: Mapping[str, tuple[str, ...]]
    triton: tuple[str, ...]
    evidence: tuple[str, ...]


_VERIFIED_LARGE = ("128x256x64 w8 s4 g8", "128x128x64 w8 s3 g8", "64x256x64 w4 s4 g8", "64x128x64 w4 s3 g8")
_VERIFIED_ROWS = (*_VERIFIED_LARGE, "128x256x64 w8 s3 g8")
_TRITON_ON_HOPPER = {
    "up": _VERIFIED_ROWS,
    "down": _VERIFIED_ROWS,
    "dhidden": ("128x256x64 w8 s3 g8", "64x128x64 w8 s3 g8", "128x128x64 w8 s3 g8", "64x128x64 w4 s3 g8"),
    "dinput": _VERIFIED_ROWS,
    "dw1": ("256x128x64 w8 s3 g8", "128x128x64 w8 s3 g8", "256x128x64 w8 s4 g8", "128x256x64 w8 s3 g8"),
    "dw2": ("128x256x64 w8 s4 g8", "128x128x64 w8 s3 g8", "128x256x64 w8 s3 g8"),
}
_VERIFIED_GLUON = "gluon 128x256x64 w4 s4 g8 r168"
_VERIFIED_GLUON_ROWS = (_VERIFIED_GLUON, *(f"gluon 128x128x64 w4 s{stages} g8 r168 by turns" for stages in (5, 6)))

#: Configurations have run only on an H100 and an H200.
VERIFIED = (
    # The kernel tests checked every configuration in both half precisions and float32.
    Verified(
        (9, 0),
        232_448,
        {
            f"{operation} {dtype} ieee": names
            for operation, names in _TRITON_ON_HOPPER.items()
            for dtype in ("bfloat16", "float16")
        },
        ("3.6.0",),
        ("gpu-1_20261126T211029.json", "gpu_nvidia-h100-80gb-hbm3_20261127T015127.json"),
    ),
    # Verified by a tuner that checked results, in layers of SwiGLU experts without biases. Not covered: other
    # activations, biases, float16, accumulated gradients, and fewer programs.
    Verified(
        (9, 0),
        232_448,
        {
            "up bfloat16 ieee swiglu gather even bulk": (_VERIFIED_GLUON,),
            "down bfloat16 ieee even bulk": _VERIFIED_GLUON_ROWS,
            "dhidden bfloat16 ieee swiglu gather extra even bulk": (_VERIFIED_GLUON,),
            "dinput bfloat16 ieee even bulk": _VERIFIED_GLUON_ROWS,
            "dw1 bfloat16 ieee gather even bulk": (
                "gluon 128x256x64 w4 s4 g16 r168",
                "gluon 256x128x64 w4 s4 g8 r168",
            ),
            "dw2 bfloat16 ieee gather even bulk": (_VERIFIED_GLUON,),
        },
        ("3.6.0",),
        (
            "gpu_nvidia-h100-80gb-hbm3_20261127T012657.json",
            "gpu_nvidia-h100-80gb-hbm3_20261127T015127.json",
        ),
    ),
)


def name_of(config: Config) -> str:
    """Return a configuration's key in `Verified.configs`. The suffix " p" stands for any limited number of programs."""
    fewer = isinstance(config, HopperConfig) and config.programs > 0
    return str(with_programs(config, 0)) + " p" * fewer


def is_verified(gpu: Gpu, variant: Variant, config: Config) -> bool:
    return _is_verified(gpu, variant, config, TRITON_VERSION)


@cache
def _is_verified(gpu: Gpu, variant: Variant, config: Config, version: str) -> bool:
    words, name = f"{variant} ", name_of(config)
    return any(
        name in names
        for entry in VERIFIED
        if entry.capability == gpu.capability and gpu.shared_bytes >= entry.shared_bytes
        if version in entry.triton or not isinstance(config, HopperConfig)
        for first, names in entry.configs.items()
        if words.startswith(f"{first} ")
    )
