from __future__ import annotations

from pathlib import Path

from tests.kernels.interpreter import Interpreter

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


def test_outcomes_of_another_process(tmp_path: Path) -> None:
    file = tmp_path / "test_kinds.py"
    file.write_text(TESTS)
    interpreter = Interpreter([str(file)])

    def outcome(name: str) -> tuple[str, str]:
        nodeids = [nodeid for nodeid in interpreter._outcomes if nodeid.endswith(f"::{name}")]
        return interpreter.outcome(nodeids[0] if nodeids else name)

    died = interpreter.outcome("test_never")  # reads on until the process has ended
    assert died[0] == "failed" and "code 3" in died[1]
    assert outcome("test_here")[0] == outcome("test_numbers[1]")[0] == "passed"
    failed = outcome("test_numbers[2]")
    assert failed[0] == "failed" and "assert 2 == 1" in failed[1]
    assert outcome("test_skipped") == ("skipped", "Skipped: not today")
    assert outcome("test_expected")[0] == "xfailed"
    failed = outcome("test_teardown")
    assert failed[0] == "failed" and "in teardown" in failed[1]
    interpreter.close()
