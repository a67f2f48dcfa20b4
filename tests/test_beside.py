"""Outcomes of tests that run in a second process are reported in the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.beside import ROOT

TESTS = """
import os
import pytest

def test_here(): assert os.environ["TRITON_INTERPRET"] == "1"
@pytest.mark.parametrize("x", [1, 2])
def test_numbers(x): assert x == 1
def test_skipped(): pytest.skip("not today")
@pytest.mark.xfail(strict=True)
def test_expected(): assert 0
@pytest.fixture
def broken(): yield; raise ValueError("in teardown")
def test_teardown(broken): pass
def test_dies(): os._exit(3)
def test_never(): pass
"""


CONFTEST = """
from pathlib import Path
from tests import beside

beside.ROOT = Path(__file__).parent

def pytest_runtestloop(session):
    if not session.config.pluginmanager.has_plugin("tests.beside"):
        there = beside.Beside([item.nodeid for item in session.items], (), {"TRITON_INTERPRET": "1"})
        session.config.add_cleanup(there.close)
        elsewhere = beside.Elsewhere()
        elsewhere.add(session.items, there)
        session.config.pluginmanager.register(elsewhere)
"""


def test_second_process_outcomes_are_reported(tmp_path: Path) -> None:
    for name, text in (("test_kinds", TESTS), ("conftest", CONFTEST), ("pyproject", "")):
        Path(tmp_path, name).with_suffix(".toml" if name == "pyproject" else ".py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    del environment["PYTEST_CURRENT_TEST"]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    said = ran.stdout
    for name in ("test_here", "test_numbers[1]", "test_teardown"):
        assert f"PASSED test_kinds.py::{name}\n" in said
    assert "FAILED test_kinds.py::test_numbers[2] - assert 2 == 1" in said
    assert ": not today" in said and "XFAIL test_kinds.py::test_expected" in said
    assert "ERROR test_kinds.py::test_teardown - ValueError: in teardown" in said
    for name in ("test_dies", "test_never"):
        assert f"FAILED test_kinds.py::{name} - ProcessLookupError: a process ended with code 3 before" in said
    assert "A process that had tests to run broke:\n" in said
    assert said.splitlines()[-1].startswith("=") and "3 failed, 3 passed, 1 skipped, 1 xfailed, 1 error" in said
