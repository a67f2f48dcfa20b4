"""CUDA kernels of a client's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusedmoe.tutel.impls.jit_compiler import JitCompiler


def create_cuda_kernel(source: str, keyword_dict: Mapping[str, Any] | None = None) -> Callable[..., None]:
    """Makes a function of CUDA source; see `JitCompiler`."""
    return JitCompiler.generate_kernel(keyword_dict or {}, source)


__all__ = ["JitCompiler", "create_cuda_kernel"]
