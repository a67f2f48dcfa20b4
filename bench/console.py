"""Console for the tables of the benchmarks."""

from __future__ import annotations

import sys

from rich.console import Console

# Wider than any table.
_PIPED_WIDTH = 1000


def stdout_console(*, highlight: bool = True) -> Console:
    """Return a console for stdout. Piped output is never wrapped, and its headers are never cut."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=highlight)
