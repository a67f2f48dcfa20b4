"""Exceptions of the library. Messages state what failed, on which rank and in which operation, and the fix."""

from __future__ import annotations

import inspect
import unicodedata
import warnings
from collections.abc import Callable
from typing import Any

# Control and format characters (terminal sequences, bidirectional overrides), surrogates, and line separators.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: Fix in errors of late ranks. The command replaces it by its flag.
TIMEOUT_CURE = "give Topology (or GraphBackend) a larger timeout_s"


def printable(text: str) -> str:
    r"""Escape characters that a terminal interprets, which could move the cursor, hide text or add lines.

    ESC becomes \x1b, a line feed \n.
    """
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode("ascii") if unicodedata.category(one) in _UNPRINTABLE else one
        for one in text
    )


def warn(message: str, stacklevel: int = 1) -> None:
    warnings.warn(printable(message), stacklevel=stacklevel + 1)


class _Printable(Exception):
    """Exception with an escaped message."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in args))


class ConfigError(_Printable, ValueError):
    """Invalid argument, shape or topology, detected before any communication."""


class DerivativeError(ConfigError, NotImplementedError):
    """An operation lacks a derivative; the message names the operation.

    Also a `NotImplementedError`, like PyTorch's own error for missing derivatives.
    """


class RankError(_Printable, RuntimeError):
    """A rank failed or rejected its input. All ranks of the group raise the same error.

    The message names the rank, the operation and the fix.

    Attributes:
        agreed: all ranks raise it at the same point, and no communication is in flight except operations started
            before. Later operations can proceed.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


def callable_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def require_parameters(function: Callable[..., Any], called: str, *parameters: str) -> None:
    """Raise `ConfigError` if a user's function cannot be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"{called}: {error}; it is called with ({', '.join(parameters)})") from error
    except ValueError:
        pass  # a callable without a signature
