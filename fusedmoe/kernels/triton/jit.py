"""`jit`, which makes the library's kernels; the functions that they are made of are `triton.jit`'s.

Beside what `triton.jit` does, a launch goes to the GPU that its tensors are on, whichever is current, and code for
Hopper and later has a fence that Triton 3.6 leaves out.

Tensor cores of Hopper and Blackwell read shared memory through another path (PTX: the async proxy) than threads and
their asynchronous copies (`cp.async`) write it through. Between the two must stand `fence.proxy.async`, or what is
multiplied may be what lay there before. Triton 3.7 puts one there; 3.6 does for ordinary stores, not for asynchronous
copies, in which rows that are looked up come. So under 3.6 each wait for such copies gets the fence, in the thread
that made them and before the barrier that others pass: it goes into the PTX while that is made. What tells whether it
is there is the check of everything that is compiled ahead of time (`make aot`).
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
#: Whether this Triton leaves the fence out.
FENCE_LEFT_OUT = VERSION < (3, 7)
#: Registers that a thread can have.
MOST_REGISTERS = 255

_FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(r"^(\s*)(cp\.async\.wait_(?:group|all)\b[^;]*;)", re.M)
# Products that read shared memory through the async proxy.
_PRODUCT = re.compile(r"^\s*(?:@!?[%\w]+\s+)?(?:wgmma\.mma_async|tcgen05\.mma)\b", re.M)


class Kernel(JITFunction):
    """Launches where its first tensor is."""

    def run(self, *args: Any, **keywords: Any) -> Any:
        for argument in args:
            tensor = getattr(argument, "base", argument)  # that of a descriptor, Triton's or Gluon's
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                if tensor.get_device() == torch.cuda.current_device():
                    break  # as almost always: to ask costs less than to make it current again
                with torch.cuda.device(tensor.device):
                    return super().run(*args, **keywords)
        return super().run(*args, **keywords)


def with_fences(ptx: str) -> str:
    """PTX with a fence behind each wait for asynchronous copies where products need it."""
    return _WAIT.sub(rf"\1\2\n\1{_FENCE}", ptx) if _PRODUCT.search(ptx) else ptx


class FencedKernel(Kernel):
    """Compiles with the fences, and finds only what was compiled so in Triton's cache."""

    compile: Any  # what Triton's own code calls
    _compiling = False
    _lock = RLock()  # Triton has one hook for all

    @property
    def cache_key(self) -> str:
        key = super().cache_key
        return f"{key}-fenced" if self._compiling else key

    def create_binder(self) -> Any:
        made = super().create_binder()
        self.compile = partial(self._with_fences, self.compile)
        return made

    def _with_fences(self, compile: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        with self._lock:
            before = knobs.runtime.add_stages_inspection_hook

            def hook(backend: Any, stages: dict[str, Any], *others: Any) -> None:
                if before is not None:
                    before(backend, stages, *others)
                make = stages["ptx"]
                stages["ptx"] = lambda source, metadata: with_fences(make(source, metadata))

            self._compiling, knobs.runtime.add_stages_inspection_hook = True, hook
            try:
                return compile(*args, **keywords)
            finally:
                self._compiling, knobs.runtime.add_stages_inspection_hook = False, before


def jit(function: Any = None, **options: Any) -> Any:
    """A decorator, with or without options of `triton.jit`.

    Raises:
        ConfigError: a Triton too old to be told of the fence.
    """
    if function is None:
        return partial(jit, **options)
    if INTERPRET:
        return triton.jit(function, **options)
    if VERSION < (3, 6):
        raise ConfigError(f"these kernels need Triton 3.6 or newer, and this is {triton.__version__}: update it")
    return (FencedKernel if FENCE_LEFT_OUT else Kernel)(function, **options)
