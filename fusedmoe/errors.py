"""The errors of the library: what went wrong, on which rank, in which operation, and what cures it."""

from __future__ import annotations


class ConfigError(ValueError):
    """An argument, a shape or a topology that cannot work; found before anything is sent."""


class DerivativeError(ConfigError, NotImplementedError):
    """A derivative that an operation does not have; the message names the operation.

    It is PyTorch's own error for missing derivatives, too, which is a RuntimeError.
    """


class RankError(RuntimeError):
    """A rank failed, or refused its input, and the others end with it.

    The message names the rank, the operation and a cure. Every rank of the group raises the same error.

    Attributes:
        agreed: the ranks have told each other, and all raise it at the same place: nothing is on its way between them
            that has not begun before, so that what follows finds nothing left of it.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed
