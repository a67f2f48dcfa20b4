"""Tests of Triton kernels: on the GPU if present, otherwise in Triton's interpreter.

To write a test, put `test_*.py` into this folder, use the fixture `device` and make tensors there. Import the kernels
at the top of the file, as anywhere. `pytest -k`, single tests and marks work. Without a GPU these tests run in another
process (tests/beside.py); if TRITON_INTERPRET=1 is set by hand (to use a debugger), in this process.

The interpreter takes about 1 ms per operation on a program's tile, so a test should have at most a few hundred
programs. Its bf16 arithmetic is wrong (kernels widen first, behind an `INTERPRET` constexpr), so test values in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec

import pytest
import torch

from fusedmoe.kernels.backend import INTERPRET
from tests.kernels.device.capture import NoWaitingMethod, NoWaitingOperation
from tests.poison import poisoned

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")


@pytest.fixture
def on_a_cpu(device: torch.device) -> None:
    """Skip on a GPU: ranks are processes that share host memory. On GPUs, virtual ranks are tested."""
    if device.type != "cpu":
        pytest.skip("processes share memory of the host; virtual ranks are tested on GPUs")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill unwritten memory with NaN, and with the greatest integers."""
    with poisoned():
        yield


@pytest.fixture
def no_sync(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync(): ...` fails if the host waits for the device (without a GPU: if it would)."""

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
