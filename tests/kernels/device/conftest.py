"""Runs the tests of this folder on the GPU or in Triton's interpreter; tests/kernels/interpreter.py says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fusedmoe.kernels.backend import INTERPRET
from tests.kernels.device.capture import NoWaitingMethod, NoWaitingOperation
from tests.kernels.interpreter import Interpreter
from tests.poison import poisoned

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

_HERE = Path(__file__).parent
_ELSEWHERE = not INTERPRET and not torch.cuda.is_available()
_INTERPRETER = pytest.StashKey[Interpreter]()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")


@pytest.fixture
def on_a_cpu(device: torch.device) -> None:
    """Skips on a GPU: ranks are processes that share memory of the host. There virtual ranks are tested."""
    if device.type != "cpu":
        pytest.skip("processes share memory of the host; virtual ranks are tested on GPUs")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nobody has written holds NaN, and the greatest integers."""
    with poisoned():
        yield


@pytest.fixture
def no_sync(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync(): ...` fails where the host waits for the device (without a GPU: where it would)."""

    @contextmanager
    def unsynchronised() -> Iterator[None]:
        if device.type == "cpu":
            with NoWaitingOperation(), NoWaitingMethod():
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return unsynchronised


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last, so that this process does not wait for the other while it has tests of its own."""
    if _ELSEWHERE:
        items.sort(key=lambda item: item.path.is_relative_to(_HERE))


def pytest_runtestloop(session: pytest.Session) -> None:
    config = session.config
    nodeids = [item.nodeid for item in session.items if item.path.is_relative_to(_HERE)]
    if not _ELSEWHERE or not nodeids or config.option.collectonly:
        return
    config.stash[_INTERPRETER] = Interpreter(nodeids, config.getoption("timeout"))
    config.add_cleanup(config.stash[_INTERPRETER].close)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _ELSEWHERE:
        return None
    result, text = pyfuncitem.config.stash[_INTERPRETER].outcome(pyfuncitem.nodeid)
    if result == "failed":
        pytest.fail(text, pytrace=False)
    elif result == "skipped":
        pytest.skip(text)
    elif result == "xfailed":
        pytest.xfail(text)
    return True
