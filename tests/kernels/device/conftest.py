"""Runs the tests of this folder on the GPU or in Triton's interpreter; tests/kernels/interpreter.py says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.kernels.backend import INTERPRET
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


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nobody has written holds NaN, and the greatest integers."""
    with poisoned():
        yield


class _NoWaitingOperation(TorchDispatchMode):
    """Refuses operations that on CUDA wait for the device, to learn a value or the shape of their result."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave", "equal")

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket.__name__ in self.NAMES:
            raise RuntimeError(f"{function} would wait for the device")
        return function(*args, **(kwargs or {}))


class _NoWaitingMethod(TorchFunctionMode):
    """The same for what reads a CPU tensor without an operation."""

    METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in self.METHODS:
            raise RuntimeError(f"{function} would wait for the device")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_sync(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync(): ...` fails where the host waits for the device (without a GPU: where it would)."""

    @contextmanager
    def unsynchronised() -> Iterator[None]:
        if device.type == "cpu":
            with _NoWaitingOperation(), _NoWaitingMethod():
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
