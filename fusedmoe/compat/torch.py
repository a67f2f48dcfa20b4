"""Private names of PyTorch, checked against 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.compat import require_names
from fusedmoe.errors import ConfigError

CHECKED = "2.11 to 2.15"

require_names("torch", torch.__version__, CHECKED, TorchDispatchMode, "__torch_dispatch__", "__enter__", "__exit__")
# Every collective of PyTorch runs as an operator of one of these namespaces.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
require_names("torch", torch.__version__, CHECKED, torch.ops.c10d, "allreduce_", "alltoall_base_")


class RefuseCollectives(TorchDispatchMode):
    """A mode in which a collective of `torch.distributed` raises `ConfigError` before it sends anything.

    Args:
        what: the beginning of the error: who calls the collective.
        cure: the end of the error.
    """

    def __init__(self, what: str, cure: str) -> None:
        super().__init__()
        self._what, self._cure = what, cure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise ConfigError(
                f"{self._what} {func} while the collectives of a schedule run, so that ranks could issue them in "
                f"different orders. {self._cure}"
            )
        return func(*args, **(kwargs or {}))
