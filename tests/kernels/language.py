"""Triton's interpreter without the work that takes half of its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl


def patch_once() -> None:
    """Patch the interpreter; unknown versions of Triton, which may work differently, stay unchanged.

    * Functions called by kernels do not patch the interpreter's operations into the language again. The kernel's launch
      has done so; Triton repeats it at each call, by iterating over everything in its modules.
    * Integer sums and products are not recomputed in int64: Triton does so to detect an overflow, and then discards the
      finding, as its interpreter's options have no `debug`.
    * The table of NumPy's types is not rebuilt for each value.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and not getattr(builder.options, "debug", True):
        builder.options = replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if not hasattr(interpreter, "_patch_lang"):
        return
    call = interpreter.InterpretedFunction.__call__

    def quick(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in _languages(self.fn)):
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = quick


@cache
def _languages(function: Any) -> list[ModuleType]:
    return [one for one in function.__globals__.values() if one is tl or one is tl.core]


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cached lookup for types of one element; block types cannot be hashed."""
    found: dict[str, Any] = {}

    def known(of: Any) -> Any:
        name = of.scalar.name
        if name not in found:
            found[name] = find(of.scalar)
        return found[name]

    return known
