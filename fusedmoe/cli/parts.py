"""A step beside its prediction, part by part, as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fusedmoe.schedule.refit import Row


def table_of(rows: Sequence[Row]) -> str:
    """Milliseconds of each part, and of the step last; by how much predictions are off, in percent."""
    table = Table(title="seconds at work, ms", title_justify="left")
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        seconds = ("–" if s is None else f"{1e3 * s:.2f}" for s in (row.predicted_s, row.measured_s))
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(row.part, *seconds, error, style="bold" if row is rows[-1] else None, end_section=row is rows[-2])
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text
