"""Import of an optional library."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from bench.gpu.layer import Unavailable


def find(name: str) -> ModuleType:
    """Return the module, or raise `Unavailable`; an installed library may fail to import in many ways."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0]:
            raise Unavailable("not installed") from None
        raise Unavailable(f"does not import: {error}") from error
    except Exception as error:
        raise Unavailable(f"does not import: {type(error).__name__}: {error}") from error
