"""Parts of a run: action, time limit, outcome; and their common context."""

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

# Timeout without output. A tuner gives up a launch after 30 s and reports it.
SILENCE_S = 60.0


class Outcome(NamedTuple):
    """Outcome of a part. `result`: passed, skipped (impossible here), unfinished (no time), failed, alarm or not run.

    `output`: end of the output, on failure. `found`: additional JSON data.
    """

    result: str
    word: str
    output: str = ""
    found: Mapping[str, Any] = {}


class Log:
    """Complete log in a file, and a short one on standard output."""

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
        """Write text of source `who` to the file only."""
        if self._file is None:
            return
        prefix = f"{who} | " if who else ""
        with self._lock:
            self._file.writelines(f"{prefix}{line}\n" for line in text.splitlines())
            self._file.flush()


@dataclass(frozen=True)
class Place:
    """Context of a part.

    Attributes:
        stem: path prefix of all result files; scratch: a temporary folder.
        cores: number of processes that may compute at once.
        rehearsal: run the same code without a GPU, at tiny sizes on the CPU; times are meaningless.
        environment: variables of all processes.
        done: outcomes of earlier parts by name.
        stop: set to end the run and all its processes.
        who: name of the part. deadline: its end, by `time.monotonic()`.
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
        """Return the path of a result file."""
        return self.stem.with_name(self.stem.name + ending)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def of(self, who: str, deadline: float) -> Place:
        """Return the context of one part."""
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
        """Run a Python process (`arguments` follow the interpreter) to its end, at most until the deadline."""
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
    """Part of a run. `seconds`: time limit. `needs`: required earlier parts. `about`: one-line description."""

    name: str
    seconds: float
    do: Callable[[Place], Outcome]
    about: str
    needs: tuple[str, ...] = ()


def judge_exit(ended: Ended) -> Outcome:
    """Derive the outcome from the exit status; the message is the last line of output."""
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
    """Return the size of a file, 0 if it does not exist; growth indicates that its writer is alive."""
    return file.stat().st_size if file.exists() else 0


def write_json(path: Path, found: object) -> None:
    """Write a file atomically, so that a killed writer leaves the previous content."""
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)
