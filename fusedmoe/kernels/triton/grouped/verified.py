"""Configurations of the grouped GEMMs verified on GPUs: the only ones that the run-time tuner times.

`python -m bench.gpu.verify`, a part of `make bench-gpu`, compares every candidate with its reference and records the
results in bench/results. Entries are added here by hand, with the file of the result and its Triton version.

Results of the Gluon form hold only for the Triton versions of their evidence, because Gluon is experimental. Results of
the Triton form hold for every tested version: `make aot` compiles each configuration with each version and checks the
machine code. Untuned launches use the Triton form as well, so this table could not exclude a version that miscompiles
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import triton

from fusedmoe.kernels.generation import Capability
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Variant, with_programs

TRITON_VERSION: str = triton.__version__


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
