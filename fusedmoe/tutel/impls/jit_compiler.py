"""CUDA kernels from source, compiled on first call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedmoe.compat.torch import compile_cuda
from fusedmoe.errors import ConfigError

IS_HIP_EXTENSION = torch.version.hip is not None

_EXTENT = re.compile(r"//\s*\[thread_extent\]\s*(blockIdx|threadIdx)\.([xyz])\s*=\s*(\d+)")
_BOUNDS = r"__launch_bounds__\s*\([^)]*\)"
_NAME = re.compile(rf"__global__\b(?:\s+\w+|\s*{_BOUNDS})*?\s*\bvoid\b(?:\s*{_BOUNDS})?\s*(\w+)\s*\(")


class JitCompiler:
    """Compiler of CUDA source: `generate_kernel({'N': 4}, source)` returns a function of tensors and numbers.

    The source contains one `__global__` function, placeholders `@NAME@`, and comments that specify the grid, such as
    `// [thread_extent] blockIdx.x = 128`.
    """

    @staticmethod
    def create_raw(source: str) -> Callable[..., None]:
        """Return the function of a source without placeholders: it takes tensors, then `extra=[numbers]`."""
        named = _NAME.search(source)
        if named is None:
            raise ConfigError("the source has no `__global__ void name(…)`")
        extents = {(kind, axis): int(size) for kind, axis, size in _EXTENT.findall(source)}
        grid, block = (tuple(extents.get((kind, axis), 1) for axis in "xyz") for kind in ("blockIdx", "threadIdx"))
        compiled: list[Any] = []

        def call(*inputs: Tensor, extra: list[Any] | None = None) -> None:
            if not torch.cuda.is_available():
                raise ConfigError(f"kernel {named[1]} is CUDA source and needs a CUDA GPU")
            if not compiled:
                compiled.append(compile_cuda(source, named[1]))
            compiled[0](grid=grid, block=block, args=[*inputs, *(extra or [])])

        return call

    @staticmethod
    def generate_kernel(keyword_dict: Mapping[str, Any], template: str) -> Callable[..., None]:
        """Replace placeholders by the values of `keyword_dict`, and return the kernel's function."""
        for name, value in keyword_dict.items():
            template = template.replace(f"@{name}@", str(value))
        return JitCompiler.create_raw(template)


def create_cuda_kernel(source: str, keyword_dict: Mapping[str, Any] | None = None) -> Callable[..., None]:
    return JitCompiler.generate_kernel(keyword_dict or {}, source)
