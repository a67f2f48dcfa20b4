"""Progress bars for long operations and training runs."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fusedmoe.errors import printable

_SHOW_AFTER_S = 2.0

# No remaining time is shown before this fraction of the work is done.
_MIN_DONE_FRACTION = 0.1

# Between two lines without a terminal.
_LINE_INTERVAL_S = 15.0


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Progress bar on stderr with the remaining time, shown after 2 s; without a terminal, a line every 15 s.

        with ProgressBar("simulating") as bar:
            work(bar.show)              # calls show(done, total)

    Args:
        what: the work, as shown.
        budget_s: time limit of the work in seconds, shown in place of an estimate.
    """

    def __init__(self, what: str, budget_s: float | None = None) -> None:
        self._label, self._began_s, self._budget_s = what, time.monotonic(), budget_s
        console = Console(stderr=True)
        left = RemainingColumn() if budget_s is None else TextColumn(f"at most {_format_duration(budget_s)} in all")
        parts = (TextColumn(what, markup=False), BarColumn(), TaskProgressColumn(), left)
        self._terminal = console.is_terminal
        self._progress = Progress(*parts, console=console, transient=True, disable=not self._terminal)
        self._task = self._progress.add_task(what, total=None)
        self._next_s = self._began_s + _SHOW_AFTER_S
        self._is_shown = False

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, done: float, total: float) -> None:
        """Update the bar. `done` and `total` have any common unit."""
        now = time.monotonic()
        if self._terminal:
            if now > self._next_s:
                self._is_shown = True
                self._progress.start()
                self._progress.update(self._task, completed=done, total=total)
        elif self._next_s < now and 0 < done < total:
            self._is_shown, self._next_s = True, now + _LINE_INTERVAL_S
            left = ""
            if self._budget_s is not None:
                left = f", at most {_format_duration(self._budget_s)} in all"
            else:
                left = _format_remaining(now - self._began_s, done, total)
            print(f"fusedmoe: {self._label}: {done / total:.0%}{left}", file=sys.stderr, flush=True)

    def finish(self, done: str, suffix: str = "") -> None:
        """Print that the work ended and its duration, such as "measured in 17 s", if progress was shown."""
        self._progress.stop()
        if self._is_shown:
            text = f"fusedmoe: {done} in {time.monotonic() - self._began_s:.0f} s{suffix}"
            print(printable(text), file=sys.stderr, flush=True)


class RemainingColumn(ProgressColumn):
    """Remaining time, once a tenth of the work is done."""

    max_refresh = 0.5

    def __init__(self, suffix: str = "") -> None:
        super().__init__()
        self._column, self._suffix = TimeRemainingColumn(), suffix

    def render(self, task: Task) -> Text:
        if task.percentage < 100 * _MIN_DONE_FRACTION:
            return Text("")
        return Text.assemble(self._column.render(task), self._suffix)


class Display(AbstractContextManager["Display"]):
    """Context that reports training steps. This base class shows nothing."""

    def __exit__(self, *error: object) -> None:
        pass

    def show_step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Show the number of completed steps, the last loss, and the speed."""

    def show_message(self, line: str) -> None:
        """Show a message between two steps."""


def make_display(rank: int, total: int, done: int) -> Display:
    if rank:
        return Display()
    return TrainingBar(total, done) if sys.stdout.isatty() else LinePrinter(total)


class LinePrinter(Display):
    """Print a line for the first and last step and every 15 s."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None
        self._next_s = 0.0

    def show_step(self, done: int, loss: float, tokens_per_s: float) -> None:
        now = time.monotonic()
        first, began_s = self._began = self._began or (done, now)
        if now >= self._next_s or done == self._total:
            self._next_s = now + _LINE_INTERVAL_S
            left = _format_remaining(now - began_s, done - first, self._total - first)
            self.show_message(f"step {done}/{self._total}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s{left}")

    def show_message(self, line: str) -> None:
        print(printable(line), flush=True)


class TrainingBar(Display):
    """Progress bar with loss, speed and remaining time."""

    def __init__(self, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            RemainingColumn(" left"),
            console=Console(),
        )
        self._task = self._progress.add_task("training", total=total, completed=done, loss="–", speed="–")

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show_step(self, done: int, loss: float, tokens_per_s: float) -> None:
        self._progress.update(self._task, completed=done, loss=f"{loss:.3f}", speed=f"{tokens_per_s:,.0f}")

    def show_message(self, line: str) -> None:
        self._progress.console.print(printable(line), markup=False, highlight=False)


def _format_remaining(elapsed_s: float, done: float, total: float) -> str:
    if not done or done < _MIN_DONE_FRACTION * total:
        return ""
    return f", {_format_duration(elapsed_s / done * (total - done))} left"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
