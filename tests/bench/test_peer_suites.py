"""The runner of third-party test suites, on a suite of four tests; this library's switch changes two of them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from bench.peer_suites.__main__ import notes, table
from bench.peer_suites.run import Result, read_outcomes, run_suite
from bench.peer_suites.suites import Suite

TESTS = """
import os
import absent_package
import pytest
from absent_package import anything

@pytest.mark.parametrize("number", [1, 2])
def test_switched(number):
    assert number == 1 or "SWITCHED" not in os.environ

def test_failing():
    assert False

@pytest.mark.skipif("SWITCHED" in os.environ, reason="switched")
def test_skipped_with_ours():
    pass

def test_slow():
    import time
    time.sleep(float(os.environ.get("SLOW_S", 0)))
"""
SWITCH = "import os\n\ndef pytest_configure(config):\n    os.environ['SWITCHED'] = '1'\n"


def project(folder: Path) -> Path:
    (folder / "tests").mkdir()
    (folder / "tests/test_fake.py").write_text(TESTS)
    (folder / "fake_switch.py").write_text(SWITCH)
    return folder


def run_fake_suite(folder: Path, limit_s: float = 120.0) -> Result:
    suite = Suite("fake", "pytest", ("tests/test_fake.py",), switch="fake_switch", stand_ins=("absent_package",))
    return run_suite(suite, folder, limit_s, lambda *_: None, folder / "build")


def test_suite_differences_list_changed_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(project(tmp_path)))
    result = run_fake_suite(tmp_path)
    assert result.version == metadata.version("pytest") and not result.reason
    assert result.counts() == {"passed": 2, "failed": 2, "skipped": 1}
    assert sorted(result.without.values()) == ["failed", *["passed"] * 4]
    name = "tests/test_fake.py::test_s"
    assert result.differences() == [f"{name}kipped_with_ours: passed -> skipped", f"{name}witched[2]: passed -> failed"]
    console = Console(width=120, record=True)
    console.print(table([result]))
    assert "pytest" in (text := console.export_text()) and " 2 " in text
    assert notes([result])[0].startswith("pytest fake: tests/test_fake.py")


def test_outcomes_of_unfinished_run_skip_partial_line(tmp_path: Path) -> None:
    """A half-written line is skipped; a test that passed and then failed in teardown has failed."""
    lines = [
        '{"collected": 3}',
        '{"test": "a", "outcome": "passed"}',
        '{"test": "a", "outcome": "failed"}',
        '{"test": "b"',
    ]
    (tmp_path / "lines").write_text("\n".join(lines))
    assert read_outcomes(tmp_path / "lines") == ({"a": "failed"}, 3)
    assert read_outcomes(tmp_path / "none") == ({}, 0)
