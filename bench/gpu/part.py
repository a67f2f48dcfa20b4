"""A part of a run: what it does, how long it may take, how it went. And what all parts work with."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.process import Ended, Process, watch

# Of a piece of work that says nothing. A tuner gives up a launch after 30 s by itself, and says which.
SILENCE_S = 60.0


class Outcome(NamedTuple):
    """Outcome of a part. `result`: passed, skipped (impossible here), unfinished (no time), failed, alarm or not run.

    `output`: the end of what was written, where it failed. `found`: what else is told of it, as JSON takes it.
    """

    result: str
    word: str
    output: str = ""
    found: Mapping[str, Any] = {}


class Log:
    """Log of all that is said, in one file as it comes, and in short on the standard output."""

    def __init__(self, file: Path | None = None) -> None:
        self._start, self._lock = time.monotonic(), threading.Lock()
        self._file = None if file is None else file.open("a")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        line = f"[{self.seconds:4.0f} s] {text}"
        with self._lock:
            print(line, flush=True)
        self.note(line)

    def note(self, text: str, who: str = "") -> None:
        """Writes text that `who` said into the file alone."""
        if self._file is None:
            return
        prefix = f"{who} | " if who else ""
        with self._lock:
            self._file.writelines(f"{prefix}{line}\n" for line in text.splitlines())
            self._file.flush()


@dataclass(frozen=True)
class Place:
    """Place of a part: what it works with.

    Attributes:
        stem: path that the names of all files with results begin with; scratch: a folder that is gone afterwards.
        cores: processes that may compute at once.
        rehearsal: no GPU is there: the same code at tiny sizes on the CPU, with times that are none.
        environment: variables of all processes.
        done: how earlier parts went, by name.
        stop: set where the run is ended: all processes are.
        who: the part. deadline: of it, by `time.monotonic()`.
    """

    stem: Path
    scratch: Path
    log: Log
    cores: int
    rehearsal: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    done: dict[str, Outcome] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    who: str = ""
    deadline: float = float("inf")

    def file(self, ending: str) -> Path:
        """Returns the path of a file for results."""
        return self.stem.with_name(self.stem.name + ending)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def of(self, who: str, deadline: float) -> Place:
        """Returns the place of one part."""
        return replace(self, who=who, deadline=deadline)

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        who: str = "",
        silence_s: float | None = None,
        sign: Callable[[], object] = lambda: None,
    ) -> Ended:
        """Runs a Python process (`arguments` follow the interpreter) to its end, at the most until the deadline."""
        return self.run_program([sys.executable, *arguments], environment, who=who, silence_s=silence_s, sign=sign)

    def run_program(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        who: str = "",
        silence_s: float | None = None,
        sign: Callable[[], object] = lambda: None,
    ) -> Ended:
        who = f"{self.who} {who}".rstrip()
        self.log.note(f"$ {' '.join(arguments)}", who)
        process = Process(arguments, {**self.environment, **(environment or {})})
        hear = partial(self.log.note, who=who)
        ended = watch(process, max(1.0, self.left), silence_s, hear, sign, self.stop.is_set)
        how = f"ended: {ended.why}" if ended.code is None else f"exit status {ended.code}"
        self.log.note(f"{how}, {ended.seconds:.1f} s", who)
        return ended


class Part(NamedTuple):
    """Part of a run. `seconds`: at most. `needs`: parts without which it would say nothing. `about`: in a line."""

    name: str
    seconds: float
    do: Callable[[Place], Outcome]
    about: str
    needs: tuple[str, ...] = ()


def judge_exit(ended: Ended) -> Outcome:
    """Judges by the exit status alone; the word is the last line."""
    last = last_line(ended.output)
    if ended.code is None:
        return Outcome("unfinished", f"{ended.why}; its last line: {last}", ended.output[-8000:])
    if ended.code:
        return Outcome("failed", last, ended.output[-8000:])
    return Outcome("passed", last)


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "it wrote nothing"


def size(file: Path) -> int:
    """Returns the size of a file, 0 where there is none: one that grows is a sign of life of whoever writes it."""
    return file.stat().st_size if file.exists() else 0


def write_json(path: Path, found: object) -> None:
    """Writes a file whole or not at all: whoever is killed while writing leaves what was there."""
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)
