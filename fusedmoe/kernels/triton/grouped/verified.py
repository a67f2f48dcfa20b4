"""Configurations of the grouped products that gave right results on a GPU. The run-time tuner times no others.

`python -m bench.gpu.verify`, a part of `make bench-gpu`, compares every candidate with its definition and records the
verdicts in bench/results. A configuration enters this table by hand, with the file that shows its verdict and the
version of Triton that it ran with. On a GPU without an entry nothing is tuned: each launch runs in the default of the
table of tiles.

Gluon is experimental: its interface, and the instructions that its programs control themselves, change between versions
of Triton. A verdict on the Gluon form therefore holds for the versions of its evidence only. A verdict on Triton's form
holds for every version that the library was tested with: `make aot` compiles each configuration with each version and
checks the machine code (bench/launches.json). The default of an untuned launch is of the same form, so the table could
not keep a launch from a version that compiles this form wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import triton

from fusedmoe.kernels.generation import Capability
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Variant, with_programs

#: The version of Triton that compiles this process's kernels.
TRITON_VERSION: str = triton.__version__


class Gpu(NamedTuple):
    """The properties of a GPU that decide which configurations it may run.

    Attributes:
        capability: compute capability.
        shared_bytes: the most shared memory that a block can have.
        multiprocessors: number of multiprocessors.
    """

    capability: Capability
    shared_bytes: int
    multiprocessors: int


class Verified(NamedTuple):
    """Configurations that gave right results on one kind of GPU.

    Attributes:
        capability, shared_bytes: as of `Gpu`.
        configs: names of configurations by the first words of the variants that were checked (`str(Variant)`). A name
            that ends in " p" was checked with fewer programs than tiles, as a launch beside communication has them.
        triton: versions of Triton in the evidence. The Gluon form is verified for these versions only.
        evidence: files of bench/results with the verdicts.
    """

    capability: Capability
    shared_bytes: int
    configs: Mapping[str, tuple[str, ...]]
    triton: tuple[str, ...]
    evidence: tuple[str, ...]


_LARGE = ("128x256x64 w8 s4 g8", "128x128x64 w8 s3 g8", "64x256x64 w4 s4 g8", "64x128x64 w4 s3 g8")
_ROWS = (*_LARGE, "128x256x64 w8 s3 g8")
_TRITON_ON_HOPPER = {
    "up": _ROWS,
    "down": _ROWS,
    "dhidden": ("128x256x64 w8 s3 g8", "64x128x64 w8 s3 g8", "128x128x64 w8 s3 g8", "64x128x64 w4 s3 g8"),
    "dinput": _ROWS,
    "dw1": ("256x128x64 w8 s3 g8", "128x128x64 w8 s3 g8", "256x128x64 w8 s4 g8", "128x256x64 w8 s3 g8"),
    "dw2": ("128x256x64 w8 s4 g8", "128x128x64 w8 s3 g8", "128x256x64 w8 s3 g8"),
}
_GLUON = "gluon 128x256x64 w4 s4 g8 r168"
_GLUON_ROWS = (_GLUON, *(f"gluon 128x128x64 w4 s{stages} g8 r168 by turns" for stages in (5, 6)))

#: The only GPUs on which configurations have run are an H100 and an H200.
VERIFIED = (
    # The tests of the kernels checked every configuration, in both half precisions and float32.
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
    # A tuner that checked before it timed, in layers of SwiGLU experts without biases. Other activations, biases,
    # float16, gradients that are added to a chunk's before, and fewer programs were not checked by these runs.
    Verified(
        (9, 0),
        232_448,
        {
            "up bfloat16 ieee swiglu gather even bulk": (_GLUON,),
            "down bfloat16 ieee even bulk": _GLUON_ROWS,
            "dhidden bfloat16 ieee swiglu gather extra even bulk": (_GLUON,),
            "dinput bfloat16 ieee even bulk": _GLUON_ROWS,
            "dw1 bfloat16 ieee gather even bulk": (
                "gluon 128x256x64 w4 s4 g16 r168",
                "gluon 256x128x64 w4 s4 g8 r168",
            ),
            "dw2 bfloat16 ieee gather even bulk": (_GLUON,),
        },
        ("3.6.0",),
        (
            "gpu_nvidia-h100-80gb-hbm3_20261127T012657.json",
            "gpu_nvidia-h100-80gb-hbm3_20261127T015127.json",
        ),
    ),
)


def name_of(config: Config) -> str:
    """Returns the name of a configuration in the table, the same for any number of programs below all."""
    fewer = isinstance(config, HopperConfig) and config.programs > 0
    return str(with_programs(config, 0)) + " p" * fewer


def is_verified(gpu: Gpu, variant: Variant, config: Config) -> bool:
    """Return whether a configuration gave right results on such a GPU in such a variant.

    The Gluon form needs evidence with this version of Triton. Triton's form does not; see the module's docstring.
    """
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
