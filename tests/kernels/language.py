"""Triton's interpreter without what takes a third of its time."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl


def patch_once() -> None:
    """Functions that kernels call do not put the interpreter's operations into the language where they are already.

    A kernel's launch has done so; Triton does it again at each call, by going through all that its modules have. Of
    other versions of Triton, which may do that elsewhere, everything stays as it is.
    """
    from triton.runtime import interpreter

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
