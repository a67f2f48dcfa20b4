"""`jit`, the decorator of the library's kernels; their device functions use `triton.jit`.

A decorated kernel launches on the GPU of its tensors, even if another GPU is current.

Tensor cores of Hopper and Blackwell read shared memory through the async proxy (PTX). Without `fence.proxy.async` after
a write by threads or by `cp.async` they may read stale data. Triton 3.7 emits it; Triton 3.6 does not after `cp.async`,
which loads gathered rows. Under 3.6, the fence is inserted into the PTX after each wait for `cp.async`, in the thread
that issued the copies and before the barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import torch
import triton
from triton import JITFunction, knobs

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET

VERSION = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
FENCE_OMITTED = VERSION < (3, 7)
MAX_REGISTERS = 255

_FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(r"^(\s*)(cp\.async\.wait_(?:group|all)\b[^;]*;)", re.M)
_PRODUCT = re.compile(r"^\s*(?:@!?[%\w]+\s+)?(?:wgmma\.mma_async|tcgen05\.mma)\b", re.M)


class Kernel(JITFunction):
    """Kernel that launches on the device of its first tensor argument."""

    def run(self, *args: Any, **keywords: Any) -> Any:
        for argument in args:
            tensor = getattr(argument, "base", argument)  # a descriptor's base tensor, Triton's or Gluon's
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                if tensor.get_device() == torch.cuda.current_device():
                    break  # the common case: cheaper than setting the current device again
                with torch.cuda.device(tensor.device):
                    return super().run(*args, **keywords)
        return super().run(*args, **keywords)


def insert_fences(ptx: str) -> str:
    """Insert a fence after each wait for asynchronous copies, if tensor-core instructions in the PTX need it."""
    return _WAIT.sub(rf"\1\2\n\1{_FENCE}", ptx) if _PRODUCT.search(ptx) else ptx


class FencedKernel(Kernel):
    """Kernel compiled with fences, under a separate key in Triton's cache."""

    compile: Any  # called by Triton
    _compiling = False
    _lock = RLock()  # Triton's hook is global

    @property
    def cache_key(self) -> str:
        key = super().cache_key
        return f"{key}-fenced" if self._compiling else key

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.compile = partial(self._with_fences, self.compile)
        return binder

    def _with_fences(self, compile: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        with self._lock:
            before = knobs.runtime.add_stages_inspection_hook

            def hook(backend: Any, stages: dict[str, Any], *others: Any) -> None:
                if before is not None:
                    before(backend, stages, *others)
                make = stages["ptx"]
                stages["ptx"] = lambda source, metadata: insert_fences(make(source, metadata))

            self._compiling, knobs.runtime.add_stages_inspection_hook = True, hook
            try:
                return compile(*args, **keywords)
            finally:
                self._compiling, knobs.runtime.add_stages_inspection_hook = False, before


def jit(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel like `triton.jit`, with or without its options.

    Raises:
        ConfigError: Triton is older than 3.6; the fences cannot be added to its PTX.
    """
    if function is None:
        return partial(jit, **options)
    if INTERPRET:
        return triton.jit(function, **options)
    if VERSION < (3, 6):
        raise ConfigError(f"the kernels need Triton 3.6 or newer, found {triton.__version__}: upgrade Triton")
    return (FencedKernel if FENCE_OMITTED else Kernel)(function, **options)
