"""A fence that Triton 3.6 leaves out of code for Hopper and Blackwell.

Tensor cores of Hopper and Blackwell read shared memory through another path (PTX: the async proxy) than threads and
their asynchronous copies (`cp.async`) write it through. Between the two must stand `fence.proxy.async`, or what is
multiplied may be what lay there before. Triton 3.7 puts one there; 3.6 does for ordinary stores, not for asynchronous
copies, in which rows that are looked up come. So under 3.6 each wait for such copies gets the fence, in the thread
that made them and before the barrier that others pass: it goes into the PTX while that is made.

What tells whether it is there is the check of everything that is compiled ahead of time (`make aot`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import triton
from triton import JITFunction, knobs

VERSION = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
#: Whether this Triton leaves the fence out.
LEFT_OUT = VERSION < (3, 7)

_FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(r"^(\s*)(cp\.async\.wait_(?:group|all)\b[^;]*;)", re.M)
# Products that read shared memory through the async proxy.
_PRODUCT = re.compile(r"^\s*(?:@!?[%\w]+\s+)?(?:wgmma\.mma_async|tcgen05\.mma)\b", re.M)


def with_fences(ptx: str) -> str:
    """The same code, with a fence behind each wait for asynchronous copies where products need it."""
    return _WAIT.sub(rf"\1\2\n\1{_FENCE}", ptx) if _PRODUCT.search(ptx) else ptx


class Fenced(JITFunction):
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
