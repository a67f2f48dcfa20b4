"""Tests that run in another pytest process, beside those of this one, and are reported as its own.

A process waits for ranks, for the ends of processes and for time-outs about as long as it computes, so that one alone
leaves cores idle. Two kinds of tests run beside the others (tests/conftest.py):

- Those of Triton kernels (tests/kernels/device), without a GPU: Triton decides when a kernel is *defined* whether it is
  to be compiled or interpreted, by the environment variable TRITON_INTERPRET, and other tests want no interpreter.
- Some folders, where all tests are run.

Options like `-x`, `-k` and `-m` mean what they always mean. A debugger or `-s` sees tests of this process only: name
the files that you want, and with kernels set TRITON_INTERPRET=1.

This file is both ends: `Beside` and `replay` in the waiting process, and the plugin (`pytest_configure`) in the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

from tests.lifetime import end_with

ROOT = Path(__file__).parents[1]
_PIPE, _PARENT = "FUSEDMOE_TEST_REPORTS", "FUSEDMOE_TEST_PARENT"


class Beside:
    """A pytest process that works through the given tests."""

    def __init__(
        self, nodeids: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> None:
        """`environment`: beside that of this process; `timeout_s`: of one test, if it is not the usual one."""
        reports, told = Pipe(duplex=False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        options = ["-p", "tests.beside", "-p", "no:cacheprovider", "-m", "", "--rootdir", str(ROOT)]
        options += [] if timeout_s is None else ["--timeout", str(timeout_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, *nodeids],
            cwd=ROOT,
            env={**os.environ, **(environment or {}), _PIPE: str(told.fileno()), _PARENT: str(os.getpid())},
            pass_fds=[told.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        told.close()
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._told: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        # A pipe takes only so much, and nobody may ask for long.
        Thread(target=self._read, args=(reports,), daemon=True).start()

    def _read(self, pipe: Connection) -> None:
        try:
            while True:
                self._told.put(pipe.recv())
        except EOFError:
            self._told.put(None)

    def reports(self, nodeid: str) -> list[dict[str, Any]]:
        """Waits for a test's end. Returns its reports as pytest serialises them.

        Raises:
            ProcessLookupError: the process has died before. The text tells its last words.
        """
        while not any(report["when"] == "teardown" for report in self._reports.get(nodeid, [])):
            report = self._told.get()
            if report is None:
                self._told.put(None)  # for whoever asks next
                self._output.seek(0)
                text = self._output.read().decode(errors="replace")[-4000:]
                raise ProcessLookupError(f"a process ended with code {self._process.wait()} before this test:\n{text}")
            self._reports.setdefault(report["nodeid"], []).append(report)
        return self._reports.pop(nodeid)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


def replay(item: pytest.Item, beside: Beside) -> None:
    """Reports a test that runs in another process as one of this process. A process that has died fails it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    waited = pytest.CallInfo.from_call(
        lambda: beside.reports(item.nodeid), when="call", reraise=(pytest.exit.Exception, KeyboardInterrupt)
    )
    if waited.excinfo is not None:  # it may be pytest's time-out, too
        item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, waited))
    else:
        for told in waited.result:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=told)
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


class _Teller:
    """In the other process: tells what becomes of each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._pipe = config, Connection(int(os.environ[_PIPE]), readable=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._pipe.send(hook(config=self._config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    """In the other process."""
    end_with(int(os.environ[_PARENT]))
    config.pluginmanager.register(_Teller(config))
