"""Progress bars for long operations and training runs."""

from __future__ import annotations

import sys
import time

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

# No bar for shorter work.
_AFTER_S = 2.0

# No remaining time before this fraction of the work is done: the first parts are often slower or faster than the rest.
_ESTIMATE_FROM = 0.1

# Seconds between two lines without a terminal.
_LINE_EVERY_S = 15.0


class ProgressBar:
    """Progress bar on stderr with the remaining time, shown after 2 s; without a terminal, a line every 15 s.

    with ProgressBar("simulating") as bar:
        work(bar.show)              # calls show(done, total)

    Args:
        what: the work, as shown.
        budget_s: time limit of the work in seconds, shown in place of an estimate.
    """

    def __init__(self, what: str, budget_s: float | None = None) -> None:
        self._what, self._began, self._budget_s = what, time.monotonic(), budget_s
        console = Console(stderr=True)
        left = RemainingColumn() if budget_s is None else TextColumn(f"at most {_clock(budget_s)} in all")
        parts = (TextColumn(what, markup=False), BarColumn(), TaskProgressColumn(), left)
        self._terminal = console.is_terminal
        self._progress = Progress(*parts, console=console, transient=True, disable=not self._terminal)
        self._task = self._progress.add_task(what, total=None)
        self._next_s = self._began + _AFTER_S

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, done: float, total: float) -> None:
        """Update the bar. `done` and `total` have any common unit."""
        now = time.monotonic()
        if self._terminal:
            if now > self._next_s:
                self._progress.start()
                self._progress.update(self._task, completed=done, total=total)
        elif self._next_s < now and 0 < done < total:
            self._next_s = now + _LINE_EVERY_S
            left = ""
            if self._budget_s is not None:
                left = f", at most {_clock(self._budget_s)} in all"
            elif done >= _ESTIMATE_FROM * total:
                left = f", {_clock((now - self._began) / done * (total - done))} left"
            print(f"fusedmoe: {self._what}: {done / total:.0%}{left}", file=sys.stderr, flush=True)


class RemainingColumn(ProgressColumn):
    """Remaining time, once a tenth of the work is done."""

    max_refresh = 0.5

    def __init__(self, words: str = "") -> None:
        super().__init__()
        self._column, self._words = TimeRemainingColumn(), words

    def render(self, task: Task) -> Text:
        if task.percentage < 100 * _ESTIMATE_FROM:
            return Text("")
        return Text.assemble(self._column.render(task), self._words)


class Display:
    """Context that reports training steps. This base class shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Show the number of completed steps, the last loss, and the speed."""

    def say(self, line: str) -> None:
        """Show a message between two steps."""


def make_display(rank: int, total: int, done: int) -> Display:
    """Return a bar on a terminal, lines without one, and no output on ranks other than 0."""
    if rank:
        return Display()
    return TrainingBar(total, done) if sys.stdout.isatty() else Lines(total)


class Lines(Display):
    """Print a line for the first and last step and every 15 s."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None
        self._next_s = 0.0

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        now, left = time.monotonic(), ""
        first, began_s = self._began = self._began or (done, now)
        if done - first >= max(1.0, _ESTIMATE_FROM * (self._total - first)):
            left = f", {_clock((now - began_s) / (done - first) * (self._total - done))} left"
        if now >= self._next_s or done == self._total:
            self._next_s = now + _LINE_EVERY_S
            self.say(f"step {done}/{self._total}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s{left}")

    def say(self, line: str) -> None:
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

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        self._progress.update(self._task, completed=done, loss=f"{loss:.3f}", speed=f"{tokens_per_s:,.0f}")

    def say(self, line: str) -> None:
        self._progress.console.print(printable(line), markup=False, highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
