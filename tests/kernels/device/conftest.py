"""Runs the tests of this folder on the GPU or in Triton's interpreter; tests/kernels/interpreter.py says how."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fusedmoe.kernels.backend import INTERPRET
from tests.kernels.interpreter import Interpreter

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

_HERE = Path(__file__).parent
_ELSEWHERE = not INTERPRET and not torch.cuda.is_available()
_INTERPRETER = pytest.StashKey[Interpreter]()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nobody has written holds NaN, and the greatest integers."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan() and torch.ones(1).new_empty(1, dtype=torch.int32) == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _ELSEWHERE:
        return None
    config = pyfuncitem.config
    if _INTERPRETER not in config.stash:
        nodeids = [item.nodeid for item in pyfuncitem.session.items if item.path.is_relative_to(_HERE)]
        config.stash[_INTERPRETER] = Interpreter(nodeids)
        config.add_cleanup(config.stash[_INTERPRETER].close)
    result, text = config.stash[_INTERPRETER].outcome(pyfuncitem.nodeid)
    if result == "failed":
        pytest.fail(text, pytrace=False)
    elif result == "skipped":
        pytest.skip(text)
    elif result == "xfailed":
        pytest.xfail(text)
    return True
