"""Files that jobs keep for the next ones: profiles of machines, and plans.

They lie in `$FUSEDMOE_CACHE`, or else in ~/.cache/fusedmoe.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: The environment variable that says where they lie.
CACHE = "FUSEDMOE_CACHE"


def cache_dir() -> Path:
    """The folder of the files."""
    given = os.environ.get(CACHE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fusedmoe"


def fingerprint(facts: dict[str, Any]) -> str:
    """16 hexadecimal digits of all that a file depends on, in plain types."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def own_version() -> str:
    """The library's."""
    try:
        return version("fusedmoe")
    except PackageNotFoundError:  # run from its source
        return ""


def read(path: Path) -> str | None:
    """A file's text; None where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write(path: Path, text: str, what: str) -> None:
    """All of it or nothing: a reader never sees a part. A file that cannot be written is a warning.

    `what`: for the warning, "what was measured".
    """
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        warnings.warn(
            f"{what} could not be kept ({error}); the next job has to do it again. Set {CACHE} to a folder that can be "
            "written",
            stacklevel=3,
        )
