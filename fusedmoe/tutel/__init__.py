"""Tutel's modules on this library: a script that says `from tutel import moe, net, system` runs unchanged.

    from fusedmoe.tutel import moe as tutel_moe, net, system      # in place of `from tutel import …`
    fusedmoe.tutel.install()                                      # or: `import tutel` means this package
    python -m fusedmoe.tutel script.py …                          # or: the same around a script as it is

A thin facade: routing, order, experts, communication and schedules are the library's own. Tutel's are the names, the
layout of parameters and checkpoints, and these semantics, each stated in the file named:

- capacity: k·int(cf·⌈T/E⌉), rounded up as the caller's overlap degree asks (`impls/fast_dispatch.py`);
- losses: GShard's by first choices, and load-and-importance with raw logits as thresholds (`impls/losses.py`);
- the router computes in the dtype of its weights, half precision included, unless fp32_gate (`gates/`);
- parameters and their shards: `experts/`.
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
    """Makes `import tutel`, `from tutel import …` and deeper imports give this package's modules.

    It wins over an installed Tutel. `tutel.examples` are clients, which come with Tutel: those of an installed Tutel,
    or of a checkout on the path, are found, and import this package.

    Raises:
        ConfigError: the real Tutel has been imported already.
    """
    loaded = sys.modules.get(ALIAS)
    if loaded is not None and loaded is not sys.modules[_HERE]:
        raise ConfigError("tutel is imported already: call fusedmoe.tutel.install() before the first `import tutel`")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def real_name(name: str) -> str:
    """Returns `fusedmoe.tutel.net` for `tutel.net`, and other names as they are."""
    return _HERE + name.removeprefix(ALIAS) if name == ALIAS or name.startswith(ALIAS + ".") else name


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == EXAMPLES:
            # An installed Tutel, or a checkout on the path, is found past this finder.
            whole = PathFinder.find_spec(ALIAS)
            return whole and PathFinder.find_spec(name, whole.submodule_search_locations)
        real = real_name(name)
        spec = None if real == name or name.startswith(EXAMPLES + ".") else find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(name, _Same(real), is_package=spec.submodule_search_locations is not None)


class _Same(Loader):
    """Loads a module under a second name; the module itself stays as it is."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced it by that of the alias, and pickles would name the alias.
        module.__spec__ = self._spec
