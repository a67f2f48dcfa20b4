"""Progress on a terminal: of work that may take a moment or a minute, and of a training run."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fusedmoe.errors import printable

# Work that is over sooner shows no bar.
_AFTER_S = 2.0

# Between two lines when there is no terminal to draw on.
_LINE_EVERY_S = 15.0


class WorkBar:
    """A bar on stderr that shows how much of some work is done and the time left, once it has taken a while; without a
    terminal a line now and every quarter of a minute.

    with WorkBar("simulating") as bar:
        work(bar.show)              # calls show(done, total) now and then
    """

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        console = Console(stderr=True)
        parts = (TextColumn(what, markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._terminal = console.is_terminal
        self._progress = Progress(*parts, console=console, transient=True, disable=not self._terminal)
        self._task = self._progress.add_task(what, total=None)
        self._next_s = self._began + _AFTER_S

    def __enter__(self) -> WorkBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, done: float, total: float) -> None:
        """Shows how much is done, of how much, in any unit."""
        now = time.monotonic()
        if self._terminal:
            if now > self._next_s:
                self._progress.start()
                self._progress.update(self._task, completed=done, total=total)
        elif self._next_s < now and 0 < done < total:
            self._next_s = now + _LINE_EVERY_S
            left = _clock((now - self._began) / done * (total - done))
            print(f"fusedmoe: {self._what}: {done / total:.0%}, {left} left", file=sys.stderr, flush=True)


class Display:
    """A context to report training steps to. This one shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Shows the steps that are done now, the loss of the last one, and the speed."""

    def say(self, line: str) -> None:
        """Shows something that happened between two steps."""


def make_display(rank: int, total: int, done: int) -> Display:
    """Returns the display that fits: nothing on ranks other than 0, a bar on a terminal, else lines."""
    if rank:
        return Display()
    return TrainingBar(total, done) if sys.stdout.isatty() else Lines(total)


class Lines(Display):
    """A line for the first step, for the last and every quarter of a minute."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None
        self._next_s = 0.0

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        now, left = time.monotonic(), ""
        first, began_s = self._began = self._began or (done, now)
        if done > first:
            left = f", {_clock((now - began_s) / (done - first) * (self._total - done))} left"
        if now >= self._next_s or done == self._total:
            self._next_s = now + _LINE_EVERY_S
            self.say(f"step {done}/{self._total}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s{left}")

    def say(self, line: str) -> None:
        print(printable(line), flush=True)


class TrainingBar(Display):
    """A bar that moves, with the loss, the speed and the time left."""

    def __init__(self, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
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
