"""Versions of the libraries that this one opens doors to: a clear message for those it does not know."""

from __future__ import annotations

import re
from importlib import metadata


def refused(package: str, least: str, below: str, who: str) -> ImportError | None:
    """Returns the error for a package that is missing, or of a version that was not tried; None: it is one of those.

    Args:
        package: its name in the registry.   least, below: versions from the one on, and before the other.
        who: the module of this library that needs it.
    """
    wanted = f"'{package}>={least},<{below}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return ImportError(f"{who} needs {package}, which is not installed: pip install {wanted}")
    if _numbers(least) <= _numbers(found) < _numbers(below):
        return None
    return ImportError(
        f"{who} goes with {package} from {least} on and before {below}; this is {found}: pip install {wanted}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release, those of 5.24.0rc1 as of 5.24.0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
