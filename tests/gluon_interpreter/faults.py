"""Errors of the interpreter."""

from __future__ import annotations


class KernelFault(Exception):
    """A kernel does something that can go wrong on a GPU.

    Attributes:
        what: the fault.
        partition: the faulty partition.
        events: the last events before it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.partition, self.events = what, "", tuple[str, ...]()

    def __str__(self) -> str:
        head = f"partition {self.partition}: {self.what}\nThe last events:"
        return "\n  ".join((head, *self.events))


class NotInterpreted(Exception):
    """A kernel uses a part of Gluon that the interpreter does not support."""
