"""Run tests in another pytest process, alongside this process, and report them as this process's own.

A process waits for ranks, for the ends of processes and for time-outs about as long as it computes, so one process
alone leaves cores idle. Two more may run in parallel (tests/conftest.py):

- One for the tests of Triton kernels (tests/kernels/device), without a GPU: when a kernel is *defined*, the environment
  variable TRITON_INTERPRET decides whether Triton compiles or interprets it, and other tests need no interpreter.
- One for half of the rest, where all tests are run. It begins with the last file, and each process takes the next file
  that the other has not taken, for any speed of the machine.

Options like `-x`, `-k` and `-m` keep their meaning. A debugger or `-s` reaches tests of this process only: name the
files, and for kernels set TRITON_INTERPRET=1.

This file has both ends: `Beside` and `Elsewhere` here, and a plugin (`pytest_configure`) in the other process.
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
_PIPE, _PARENT, _CLAIMS = "FUSEDMOE_TEST_REPORTS", "FUSEDMOE_TEST_PARENT", "FUSEDMOE_TEST_CLAIMS"


class Claims:
    """Files of tests, each of which is claimed by one of the processes that share the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._taken = folder, dict[Path, bool]()

    def take(self, file: Path) -> bool:
        """Whether this process has claimed the file, now or before."""
        if file not in self._taken:
            try:
                Path(self._folder, os.path.relpath(file, ROOT).replace(os.sep, " ")).touch(exist_ok=False)
            except FileExistsError:
                self._taken[file] = False
            else:
                self._taken[file] = True
        return self._taken[file]


class Beside:
    """A pytest process that runs the given tests."""

    def __init__(
        self,
        nodeids: Sequence[str],
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        claims: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            options: pytest's options.
            environment: variables added to those of this process.
            claims: an empty folder, with which the process runs only the tests that `runs` leaves to it.
        """
        reports, told = Pipe(duplex=False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._claims = None if claims is None else Claims(claims)
        options = ["-p", "tests.beside", "-p", "no:cacheprovider", "-m", "", "--rootdir", str(ROOT), *options]
        own = {_PIPE: str(told.fileno()), _PARENT: str(os.getpid()), _CLAIMS: str(claims or "")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, *nodeids],
            cwd=ROOT,
            env={**os.environ, **(environment or {}), **own},
            pass_fds=[told.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        told.close()
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._told: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._ended = False
        # A pipe's buffer is limited, and nobody may read it for a long time.
        Thread(target=self._read, args=(reports,), daemon=True).start()

    def _read(self, pipe: Connection) -> None:
        try:
            while True:
                self._told.put(pipe.recv())
        except EOFError:
            self._told.put(None)

    def runs(self, file: Path) -> bool:
        """Whether the other process runs a file of the given tests; if not, this process has claimed it from now on."""
        return self._claims is None or not self._claims.take(file)

    def finished(self) -> list[str]:
        """Tests with complete reports that have not been returned yet."""
        while not self._told.empty():
            self._keep(self._told.get())
        return [nodeid for nodeid in self._reports if self._complete(nodeid)]

    def _keep(self, report: dict[str, Any] | None) -> None:
        if report is not None:
            self._reports.setdefault(report["nodeid"], []).append(report)
        self._ended |= report is None

    def _complete(self, nodeid: str) -> bool:
        return any(report["when"] == "teardown" for report in self._reports.get(nodeid, []))

    def reports(self, nodeid: str) -> list[dict[str, Any]]:
        """Wait for a test's end. Return its reports as pytest serialises them.

        Raises:
            ProcessLookupError: the process has died before. The message includes its last output.
        """
        while not self._complete(nodeid):
            if self._ended:
                code = self._process.wait()
                raise ProcessLookupError(f"a process ended with code {code} before this test:\n{self.said()}")
            self._keep(self._told.get())
        return self._reports.pop(nodeid)

    def said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-4000:]

    def broken(self) -> bool:
        """Whether the process has ended in another way than after its tests."""
        return self._process.poll() not in (None, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


class Elsewhere:
    """Plugin that reports tests of other processes: when they end, and at the latest when it is their turn."""

    def __init__(self) -> None:
        self._processes: list[Beside] = []
        self._beside: dict[str, Beside] = {}
        self._items: dict[str, pytest.Item] = {}  # not reported yet

    def add(self, items: Sequence[pytest.Item], beside: Beside) -> None:
        self._processes.append(beside)
        for item in items:
            self._beside[item.nodeid], self._items[item.nodeid] = beside, item

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        self._report_finished()
        mine = self._beside.get(item.nodeid)
        if mine is None or not mine.runs(item.path):
            return None
        if self._items.pop(item.nodeid, None) is not None:
            self._report(item, mine)
        return True

    def pytest_sessionfinish(self) -> None:
        """Report the remaining tests if the session ends before its last test."""
        self._report_finished()

    def _report_finished(self) -> None:
        for beside in self._processes:
            for nodeid in beside.finished():
                if (finished := self._items.pop(nodeid, None)) is not None:
                    self._report(finished, beside)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for beside in self._processes:
            if beside.broken():
                terminalreporter.write_line(f"A process that had tests to run broke:\n{beside.said()}")

    def _report(self, item: pytest.Item, beside: Beside) -> None:
        """Block for a report if necessary. A process that has died fails the test."""
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
    """In the other process: claims tests, and sends their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._pipe = config, Connection(int(os.environ[_PIPE]), readable=False)
        self._claims = Claims(Path(os.environ[_CLAIMS])) if os.environ[_CLAIMS] else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return None if self._claims is None or self._claims.take(item.path) else True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._pipe.send(hook(config=self._config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the other process."""
    end_with(int(os.environ[_PARENT]))
    config.pluginmanager.register(_Teller(config))
