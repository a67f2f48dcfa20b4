from __future__ import annotations

from importlib import metadata

import pytest

from fusedmoe.versions import refused


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("5.23.0", None),
        ("5.24.1rc2+cpu", None),
        ("5.100", None),
        (
            "5.22.9",
            "goes with transformers from 5.23 on and before 6; this is 5.22.9: pip install 'transformers>=5.23,<6'",
        ),
        ("6.0", "this is 6.0"),
        (None, "fusedmoe.hf needs transformers, which is not installed: pip install 'transformers>=5.23,<6'"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, found: str | None, text: str | None) -> None:
    def version(package: str) -> str:
        assert package == "transformers"
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", version)
    error = refused("transformers", "5.23", "6", "fusedmoe.hf")
    assert error is None if text is None else isinstance(error, ImportError) and text in str(error)
