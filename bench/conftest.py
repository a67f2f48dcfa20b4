"""Fixtures and options of GPU benchmarks, which are skipped with a message without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedmoe
from bench.gpu.session import Session, open_session


def pytest_configure() -> None:
    fusedmoe.keep_memory()  # otherwise large allocations take irreproducible time in the kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedmoe")
    group.addoption("--spool", type=Path, help="file of incremental GPU results; existing rows are not measured again")
    group.addoption(
        "--seconds", type=float, default=240.0, help="time limit of GPU benchmarks in seconds (default: 240)"
    )


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> Iterator[Session]:
    session = open_session(pytestconfig.getoption("spool"), pytestconfig.getoption("seconds"))
    yield session
    session.measure_ceilings("end")
