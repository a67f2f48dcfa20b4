"""Subprocesses: start, monitor, and end with all their children."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# A process in a GPU call that never returns survives SIGKILL and is abandoned.
_PATIENCE_S = 10.0


class Ended(NamedTuple):
    """End of a process. `code`: exit status, or None if it was killed for the reason `why`.

    `output`: combined output, if it was captured.
    """

    code: int | None
    output: str
    seconds: float
    why: str = ""


class Process:
    """A process in the repository's root with its own process group, so that its children end with it."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, show: bool = False
    ) -> None:
        """`show`: inherit our output instead of capturing."""
        self._start = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `ended`
        self._heard = 0
        self._process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=None if show else self._output,
            stderr=None if show else subprocess.STDOUT,
            process_group=0,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def news(self) -> str:
        """Return the output since the last call."""
        # The process shares the open file: do not move its position.
        new = os.pread(self._output.fileno(), 2**24, self._heard)
        self._heard += len(new)
        return new.decode(errors="replace")

    def ended(self, kill: bool = False, why: str = "") -> Ended:
        """Wait for the end, or terminate; after ten seconds, kill."""
        if kill:
            for how in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self._process.pid, how)
                    self._process.wait(_PATIENCE_S)
                    break
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # children that ignored the signal
        code = None if kill else self._process.wait()
        output = os.pread(self._output.fileno(), 2**27, 0).decode(errors="replace")
        self._output.close()
        return Ended(code, output, time.monotonic() - self._start, why)


def watch(
    process: Process,
    seconds: float,
    silence_s: float | None = None,
    hear: Callable[[str], object] = lambda text: None,
    sign: Callable[[], object] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> Ended:
    """Wait for a process; end it after `seconds`, when `stop()` is true, or `silence_s` after its last sign of life.

    A sign of life is output, passed to `hear`, or a change of `sign()`.
    """
    deadline, last, before = time.monotonic() + seconds, time.monotonic(), sign()
    try:
        while True:
            running, news, now = process.running, process.news(), sign()
            if news:
                hear(news)
            if news or now != before:
                last, before = time.monotonic(), now
            if not running:
                return process.ended()
            if time.monotonic() > deadline:
                return process.ended(kill=True, why=f"its time was up, {seconds:.0f} s")
            if silence_s is not None and time.monotonic() - last > silence_s:
                return process.ended(kill=True, why=f"no sign of life for {silence_s:.0f} s")
            if stop():
                return process.ended(kill=True, why="the run was ended")
            time.sleep(0.1)
    except BaseException:
        process.ended(kill=True)
        raise
