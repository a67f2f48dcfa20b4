"""The errors of the library: what went wrong, on which rank, in which operation, and what cures it."""

from __future__ import annotations

import unicodedata
import warnings

# Control and format characters (terminal sequences, bidirectional overrides), surrogates, and ends of lines.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """Replace characters that a terminal would act on by escapes: ESC by \\x1b, a line feed by \\n.

    Text from a file, such as the name of a tensor, could otherwise move the cursor, hide text or add lines.
    """
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode("ascii") if unicodedata.category(one) in _UNPRINTABLE else one
        for one in text
    )


def warn(message: str, stacklevel: int = 1) -> None:
    """Issue a `UserWarning` whose text is printable."""
    warnings.warn(printable(message), stacklevel=stacklevel + 1)


class _Printable(Exception):
    """An error whose message has no character that a terminal would act on."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in args))


class ConfigError(_Printable, ValueError):
    """An argument, a shape or a topology that cannot work; found before anything is sent."""


class DerivativeError(ConfigError, NotImplementedError):
    """A derivative that an operation does not have; the message names the operation.

    It is PyTorch's own error for missing derivatives, too, which is a RuntimeError.
    """


class RankError(_Printable, RuntimeError):
    """A rank failed, or refused its input, and the others end with it.

    The message names the rank, the operation and a cure. Every rank of the group raises the same error.

    Attributes:
        agreed: the ranks have told each other, and all raise it at the same place: nothing is on its way between them
            that has not begun before, so that what follows finds nothing left of it.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed
