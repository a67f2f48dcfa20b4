"""Pytest plugin that records the start and outcome of each test, so that a hang or crash can be attributed.

`--notes FILE`: JSON lines; tests recorded as started are not run again. `--share K/N`: every N-th test, starting with
the K-th. `--most M`: only the first M of these. After a failure the plugin tests whether the GPU still works in this
process; if not, the process ends with `LOST`, and another one can continue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.spool import Spool

LOST = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("notes")
    group.addoption("--notes", type=Path, help="file that records the start and end of each test")
    group.addoption("--share", default="0/1", help="every N-th test starting with the K-th, as K/N (default: 0/1, all)")
    group.addoption("--most", type=int, help="maximum number of tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("notes") is not None:
        place, of = (int(number) for number in config.getoption("share").split("/"))
        notes = Notes(Spool(config.getoption("notes")), place, of, config.getoption("most"))
        config.pluginmanager.register(notes, "fusedmoe-notes")


class Notes:
    def __init__(self, spool: Spool, place: int, of: int, most: int | None) -> None:
        self._spool, self._place, self._of, self._most = spool, place, of, most
        self._worst: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        share = sorted(items, key=lambda item: item.nodeid)[self._place :: self._of][: self._most]
        begun = {record["name"] for record in self._spool.of("begin")}
        items[:] = [item for item in items if item in share and item.nodeid not in begun]
        self._spool.add("collected", count=len(share))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._spool.add("begin", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self._worst.setdefault(report.nodeid, ("failed", report.longreprtext[-6000:]))
        elif report.outcome == "skipped" and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._worst.setdefault(report.nodeid, ("skipped", reason))
        if report.when == "teardown":
            result, text = self._worst.pop(report.nodeid, ("passed", ""))
            lost = result == "failed" and not gpu_works()
            self._spool.add("end", name=report.nodeid, result=result, text=text)
            if lost:
                pytest.exit("the GPU takes no more work from this process", returncode=LOST)

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        if "is not used" in str(warning_message.message):
            self._spool.add("left out", name=nodeid, word=str(warning_message.message)[:500])


def gpu_works() -> bool:
    """Return whether this process's GPU, if any, still accepts work: after an illegal access it does not."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
