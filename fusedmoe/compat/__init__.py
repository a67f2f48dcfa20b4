"""Private names of other libraries, one module per library, each with the versions it was checked against.

Each module checks the names and signatures that it uses: an incompatible version of a library raises an error instead
of changing results.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any


def require_names(library: str, version: str, checked: str, owner: object, *names: str) -> None:
    """Raise ImportError if `owner`, a module or class, lacks a private name that fusedmoe uses.

    Args:
        library, version: name and installed version, for the message.
        checked: versions that the caller was checked against, such as "2.11 to 2.15".
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        place = getattr(owner, "__name__", repr(owner))
        raise ImportError(
            f"fusedmoe uses {', '.join(f'{place}.{name}' for name in missing)}, which {library} {version} lacks. "
            f"Install {library} {checked}."
        )


def require_parameters(
    library: str, version: str, checked: str, function: Callable[..., Any], *names: str, keywords: Collection[str] = ()
) -> None:
    """Raise ImportError if a function that fusedmoe replaces has other parameters than in the checked versions.

    Args:
        library, version, checked: as for `require_names`.
        names: of the first parameters, in order.
        keywords: names of further parameters.
    """
    found = list(inspect.signature(function).parameters)
    if tuple(found[: len(names)]) != names or not set(keywords) <= set(found):
        raise ImportError(
            f"fusedmoe replaces {function.__qualname__}({', '.join((*names, *keywords))}). {library} {version} has the "
            f"parameters ({', '.join(found)}) there. Install {library} {checked}."
        )


def require_version(package: str, least: str, below: str, who: str) -> None:
    """Raise ImportError, with the pip command, for a missing package or an untested version.

    Args:
        package: name in the package index.
        least, below: first supported and first unsupported version.
        who: module of this library that needs the package.
    """
    wanted = f"'{package}>={least},<{below}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{who} needs {package}, which is not installed: pip install {wanted}") from None
    if not _numbers(least) <= _numbers(found) < _numbers(below):
        raise ImportError(f"{who} supports {package} >= {least}, < {below}; found {found}: pip install {wanted}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; 5.24.0rc1 counts as 5.24.0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
