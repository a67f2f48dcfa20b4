"""Version checks of optional dependencies, with the pip command in the error."""

from __future__ import annotations

import re
from importlib import metadata


def version_error(package: str, least: str, below: str, who: str) -> ImportError | None:
    """Return an `ImportError` for a missing package or an untested version, otherwise None.

    Args:
        package: name in the package index.
        least, below: first supported and first unsupported version.
        who: module of this library that needs the package.
    """
    wanted = f"'{package}>={least},<{below}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return ImportError(f"{who} needs {package}, which is not installed: pip install {wanted}")
    if _numbers(least) <= _numbers(found) < _numbers(below):
        return None
    return ImportError(f"{who} supports {package} >= {least}, < {below}; found {found}: pip install {wanted}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; 5.24.0rc1 counts as 5.24.0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
