"""A progress bar for work that may take a moment or a minute."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Work that is over sooner shows no bar.
_AFTER_S = 2.0


class Bar:
    """A bar on stderr that appears once the work has taken a while; without a terminal one line then says what goes on.

    with Bar("simulating") as bar:
        work(bar.show)              # calls show(done, total) now and then
    """

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        self._console = Console(stderr=True)
        parts = (TextColumn(what, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        terminal = self._console.is_terminal
        self._progress = Progress(*parts, console=self._console, transient=True, disable=not terminal)
        self._task = self._progress.add_task(what, total=None)
        self._said = terminal

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, done: int, total: int) -> None:
        if time.monotonic() - self._began <= _AFTER_S:
            return
        if not self._said:
            self._said = True
            print(f"fusedmoe: {self._what} …", file=sys.stderr, flush=True)
        self._progress.start()
        self._progress.update(self._task, completed=done, total=total)
