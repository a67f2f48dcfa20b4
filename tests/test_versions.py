"""Versions of other libraries: refused ones, and the tested range in pins, README and dependencies."""

from __future__ import annotations

import re
import tomllib
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from fusedmoe.compat import require_version
from fusedmoe.compat import torch as compat

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("5.23.0", None),
        ("5.24.1rc2+cpu", None),
        ("5.100", None),
        (
            "5.22.9",
            "fusedmoe.hf supports transformers >= 5.23, < 6; found 5.22.9: pip install 'transformers>=5.23,<6'",
        ),
        ("6.0", "found 6.0"),
        (None, "fusedmoe.hf needs transformers, which is not installed: pip install 'transformers>=5.23,<6'"),
    ],
)
def test_unsupported_versions_are_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, text: str | None) -> None:
    def version(package: str) -> str:
        assert package == "transformers"
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", version)
    with nullcontext() if text is None else pytest.raises(ImportError, match=re.escape(text)):
        require_version("transformers", "5.23", "6", "fusedmoe.hf")


def pinned_versions(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {package: ".".join(version.split(".")[:2]) for package, version in pins}


def test_tested_range_equals_pins() -> None:
    oldest, newest = pinned_versions("oldest"), pinned_versions("newest")
    readme = " ".join((ROOT / "README.md").read_text().split())
    for package, name in (("torch", "PyTorch"), ("triton", "Triton"), ("transformers", "transformers")):
        assert f"{name} {oldest[package]} to {newest[package]}" in readme
    assert f"{oldest['torch']} to {newest['torch']}" == compat.CHECKED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {f"torch>={oldest['torch']}", f"triton>={oldest['triton']}; sys_platform == 'linux'"}
    assert needed < {*project["dependencies"]}
    assert f"transformers>={oldest['transformers']},<6" in project["optional-dependencies"]["hf"]
