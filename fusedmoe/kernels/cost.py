"""What an operation has to do at the least: the ground of rooflines and of fractions of a limit."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Floating point operations (a multiply-add counts as two), and bytes that must be read or written once."""

    flops: int
    bytes: int
