"""Kernels as Python functions: the kernel's own code, with its names bound to the interpreter."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from tests.gluon_interpreter.faults import NotInterpreted


class _Names:
    """A Gluon module whose names are resolved on access by a kernel."""

    def __init__(self, module: ModuleType, functions: Functions) -> None:
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.meaning(getattr(self._module, name), f"{self._module.__name__}.{name}")


class Functions:
    """Bindings of a kernel's names.

    Args:
        known: pairs of a function and its replacement.
        changed: a function -> a wrapper that takes the replacement and returns the function to call.
    """

    def __init__(
        self, known: Sequence[tuple[Any, Callable[..., Any]]], changed: Mapping[Any, Callable[[Any], Any]]
    ) -> None:
        self._kept = [*changed]  # keeps the ids unique
        self._changed = {id(function): change for function, change in changed.items()}
        self._known = {id(function): _refusing(function, meant) for function, meant in known}
        for key in self._changed.keys() & self._known.keys():
            self._known[key] = self._changed[key](self._known[key])

    def meaning(self, value: Any, name: str) -> Any:
        """Resolve a value that a kernel's name refers to."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, GluonJITFunction):
            return self.function(value)
        if isinstance(value, ModuleType):
            return _Names(value, self)
        if hasattr(value, "__triton_builtin__"):
            return _unknown(name)
        return value

    def function(self, kernel: Any) -> Callable[..., Any]:
        """Rebind a kernel or a device function."""
        plain: FunctionType = kernel.fn
        names: dict[str, Any] = {"__builtins__": builtins}
        made = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
        made.__kwdefaults__ = plain.__kwdefaults__
        called: Callable[..., Any] = made
        if id(kernel) in self._changed:
            called = self._changed[id(kernel)](made)
        self._known[id(kernel)] = called
        for name in plain.__code__.co_names:
            if name in plain.__globals__:
                names[name] = self.meaning(plain.__globals__[name], name)
            elif id(getattr(builtins, name, self)) in self._known:
                names[name] = self._known[id(getattr(builtins, name))]
        return called


def _refusing(function: Any, meant: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a replacement to raise on unsupported arguments."""
    taken = signature(meant)

    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            taken.bind(*arguments, **keywords)
        except TypeError as error:
            raise NotInterpreted(f"{getattr(function, '__name__', function)}: {error}") from None
        return meant(*arguments, **keywords)

    return call


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise NotInterpreted(name)

    return refuse
