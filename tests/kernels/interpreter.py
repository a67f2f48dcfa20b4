"""Tests of Triton kernels: on the GPU where there is one, in Triton's interpreter elsewhere.

How to write one: put `test_*.py` into tests/kernels/device/, take the fixture `device` and make tensors there. Import
the kernels at the top of the file, as anywhere. Nothing else is needed: `pytest -k`, single tests and marks work.

How it works: Triton decides when a kernel is *defined* whether it is to be compiled or interpreted, by the environment
variable TRITON_INTERPRET. The other tests of a run want the plain CPU path, hence no interpreter. So, without a GPU,
the tests of that folder run in one other pytest process that has TRITON_INTERPRET=1, started with the session, so that
they run beside the others, most of which leave cores idle; this process waits for each test's outcome and reports it as
its own. With a GPU, or where TRITON_INTERPRET=1 is set by hand (to use a debugger), they run right here.

Mind in such tests: the interpreter takes about 1 ms for each operation on a program's tile, so a few hundred programs
a test; its bf16 arithmetic is wrong (kernels widen first, behind an `INTERPRET` constexpr), so test numbers in float32.

This file is both ends: `Interpreter` in the waiting process, and the plugin (`pytest_…`) in the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import pytest

from tests.lifetime import end_with

ROOT = Path(__file__).parents[2]
_PIPE, _PARENT = "FUSEDMOE_TEST_OUTCOMES", "FUSEDMOE_TEST_PARENT"


class Outcome(NamedTuple):
    """`result`: passed, failed, skipped or xfailed; `text`: the failure's traceback or the reason."""

    result: str
    text: str


class Interpreter:
    """A pytest process with TRITON_INTERPRET=1 that works through the given tests."""

    def __init__(self, nodeids: Sequence[str], timeout_s: float | None = None) -> None:
        """`timeout_s`: of one test, if it is not the usual one."""
        read, write = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        options = ["-p", "tests.kernels.interpreter", "-p", "no:cacheprovider", "-m", "", "--rootdir", str(ROOT)]
        options += [] if timeout_s is None else ["--timeout", str(timeout_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, *nodeids],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", _PIPE: str(write), _PARENT: str(os.getpid())},
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(write)
        self._outcomes: dict[str, Outcome] = {}
        self._lines: SimpleQueue[str] = SimpleQueue()
        # A pipe takes only so much, and nobody may ask for long.
        Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def outcome(self, nodeid: str) -> Outcome:
        """Waits for a test's end. A process that has died fails it."""
        while nodeid not in self._outcomes:
            line = self._lines.get()
            if not line:
                self._lines.put("")  # for whoever asks next
                self._output.seek(0)
                text = self._output.read().decode(errors="replace")[-4000:]
                code = self._process.wait()
                return Outcome("failed", f"the interpreter's process ended with code {code} before this test:\n{text}")
            name, *outcome = json.loads(line)
            self._outcomes[name] = Outcome(*outcome)
        return self._outcomes[nodeid]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


def pytest_configure() -> None:
    """In the interpreter's process."""
    end_with(int(os.environ[_PARENT]))


_worst: dict[str, Outcome] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the interpreter's process: tells the outcome of a test after its teardown."""
    if report.outcome == "failed":
        text = "\n".join([report.longreprtext, *(f"--- {title}\n{body}" for title, body in report.sections)])
        _worst.setdefault(report.nodeid, Outcome("failed", text))
    elif report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        xfailed = hasattr(report, "wasxfail")
        _worst.setdefault(report.nodeid, Outcome("xfailed" if xfailed else "skipped", reason))
    if report.when == "teardown":
        outcome = _worst.pop(report.nodeid, Outcome("passed", ""))
        os.write(int(os.environ[_PIPE]), (json.dumps([report.nodeid, *outcome]) + "\n").encode())
