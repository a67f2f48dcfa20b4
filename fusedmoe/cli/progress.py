"""What rank 0 shows while it trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Between two lines when there is no terminal to draw on.
_LINE_EVERY_S = 15.0


class Display(Protocol):
    """A context to report steps to."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Steps that are done now, the loss of the last one, and the speed."""

    def say(self, text: str) -> None:
        """A line of its own."""


def make_display(rank: int, total: int, done: int) -> Display:
    """What fits: nothing on ranks other than 0, a bar on a terminal, else lines."""
    if rank:
        return Silent()
    return Bar(total, done) if sys.stdout.isatty() else Lines(total)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Lines(Silent):
    """A line for the first step, for the last and every quarter of a minute."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None
        self._next_s = 0.0

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        now = time.monotonic()
        left = ""
        if self._began is None:
            self._began = (done, now)
        elif done > self._began[0]:
            seconds = (now - self._began[1]) / (done - self._began[0]) * (self._total - done)
            left = f", {_clock(seconds)} left"
        if now >= self._next_s or done == self._total:
            self._next_s = now + _LINE_EVERY_S
            self.say(f"step {done}/{self._total}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s{left}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class Bar(Silent):
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

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        self._progress.update(self._task, completed=done, loss=f"{loss:.3f}", speed=f"{tokens_per_s:,.0f}")

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
