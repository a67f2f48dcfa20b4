"""Fixtures and options that benchmarks of a GPU share. Without a GPU they are skipped, with a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedmoe
from bench.gpu.session import Session, open_session


def pytest_configure() -> None:
    fusedmoe.keep_memory()  # what the system does for large tensors takes a time that does not repeat itself


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedmoe")
    group.addoption("--spool", type=Path, help="file for a GPU's rows as they come; those in it are not repeated")
    group.addoption("--seconds", type=float, default=240.0, help="time for a GPU's benchmarks (default 240)")


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> Iterator[Session]:
    session = open_session(pytestconfig.getoption("spool"), pytestconfig.getoption("seconds"))
    yield session
    session.measure_ceilings("end")
