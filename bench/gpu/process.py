"""Other processes: started, watched, ended with all they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """`code`: the exit status, None if it was ended here; `output`: what it wrote (to both streams), if it was kept."""

    code: int | None
    output: str
    seconds: float


class Process:
    """A Python process in the repository's root; in a session of its own, so that none of its children outlives it."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, show: bool = False
    ) -> None:
        """`show`: its output goes where ours goes, and is not kept."""
        self._start = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `ended`
        self._process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=None if show else self._output,
            stderr=None if show else subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ended(self, kill: bool = False) -> Ended:
        """Waits for the end, or ends it: politely, and after ten seconds not so."""
        if kill:
            for how, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
                try:
                    os.killpg(self._process.pid, how)
                    self._process.wait(patience_s)
                    break
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
        code = self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        self._output.close()
        return Ended(None if kill else code, output, time.monotonic() - self._start)


def run_together(
    processes: Mapping[str, Process], seconds: float, tell: Callable[[str, Ended], None]
) -> dict[str, Ended]:
    """Waits for all of them, `seconds` at most; tells of each as soon as it has ended."""
    deadline = time.monotonic() + seconds
    ended: dict[str, Ended] = {}
    while len(ended) < len(processes):
        late = time.monotonic() > deadline
        for name, process in processes.items():
            if name not in ended and (late or not process.running):
                ended[name] = process.ended(kill=process.running)
                tell(name, ended[name])
        time.sleep(0.1)
    return ended
