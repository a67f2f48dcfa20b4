"""Pytest plugin that writes each test's outcome as a JSON line, including for interrupted suites.

It also provides empty modules for packages that test files import and the environment lacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """Module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def pytest_configure(config: Any) -> None:
    for name in filter(None, os.environ.get("PEER_STAND_INS", "").split(",")):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = StandIn(name)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    _write({"collected": len(items)})


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed"})


def pytest_runtest_logreport(report: Any) -> None:
    # A failure in set-up or teardown is a failure; a skip in set-up is a skip.
    if report.when == "call" or not report.passed:
        _write({"test": report.nodeid, "outcome": report.outcome})


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["PEER_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
