"""What the interpreter raises."""

from __future__ import annotations


class KernelFault(Exception):
    """A kernel does what could go wrong on a GPU. The message ends with the last events before it."""


class NotInterpreted(Exception):
    """A kernel uses a part of Gluon that the interpreter does not know."""
