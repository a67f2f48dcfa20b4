"""Tutel's Python interface: a script with `from tutel import moe, net, system` runs unchanged.

    from fusedmoe.tutel import moe as tutel_moe, net, system      # instead of `from tutel import …`
    fusedmoe.tutel.install()                                      # or: alias `tutel` to this package
    python -m fusedmoe.tutel script.py …                          # or: run a script with the alias

Names, the layout of parameters and checkpoints, capacities, losses and the router's precision are Tutel's. Token order,
experts, communication and schedules are fusedmoe's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from fusedmoe.errors import ConfigError

__all__ = ["install"]

ALIAS = "tutel"
EXAMPLES = f"{ALIAS}.examples"
_HERE = __name__


def install() -> None:
    """Make `import tutel`, `from tutel import …` and submodule imports resolve to this package, not an installed Tutel.

    Only `tutel.examples` resolves to an installed Tutel or a checkout on the path.

    Raises:
        ConfigError: Tutel itself is already imported.
    """
    loaded = sys.modules.get(ALIAS)
    if loaded is not None and loaded is not sys.modules[_HERE]:
        raise ConfigError("tutel is imported already: call fusedmoe.tutel.install() before the first `import tutel`")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def real_name(name: str) -> str:
    """Return `fusedmoe.tutel.net` for `tutel.net`; other names unchanged."""
    return _HERE + name.removeprefix(ALIAS) if name == ALIAS or name.startswith(ALIAS + ".") else name


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == EXAMPLES:
            whole = PathFinder.find_spec(ALIAS)
            return whole and PathFinder.find_spec(name, whole.submodule_search_locations)
        real = real_name(name)
        spec = None if real == name or name.startswith(EXAMPLES + ".") else find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(name, _AliasLoader(real), is_package=spec.submodule_search_locations is not None)


class _AliasLoader(Loader):
    """Loader that registers an existing module under a second name."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has set the alias's spec, which pickles would name.
        module.__spec__ = self._spec
