"""Fixtures shared by the command's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of ten short texts to train on."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"Text number {i} has {i * 17} words, or so it says. " * 20)
    return folder
