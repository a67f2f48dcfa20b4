"""Private names of PyTorch, checked against 2.11 to 2.15."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C import _get_tracing_state as _get_tracing_state  # None unless torch.jit traces
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmoe.compat import require_names
from fusedmoe.errors import ConfigError

CHECKED = "2.11 to 2.15"

require_names("torch", torch.__version__, CHECKED, averaging, "average_parameters")
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


def check_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Have `check` called with the arguments of each call of a function of PyTorch, before the function runs.

    For functions that offer no hook. A caller that has imported the function by name earlier is not checked.

    Args:
        owner: module or class that holds the function, and whose users look it up there.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, checked)


def check_averages(check: Callable[..., None]) -> None:
    """Have `check(parameters, process_group)` called before parameters are averaged over ranks.

    All of PyTorch's averagers (periodic, hierarchical, post-local SGD) average by this one function.
    """

    # The function gets an iterator, which only one of the two can read.
    def with_list(parameters: Any, process_group: Any) -> Any:
        parameters = list(parameters)
        check(parameters, process_group)
        return average(iter(parameters), process_group)

    average = averaging.average_parameters
    averaging.average_parameters = functools.wraps(average)(with_list)  # type: ignore[assignment]


_OWN_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
require_names("torch", torch.__version__, CHECKED, nn.Module(), *_OWN_HOOKS)
require_names("torch", torch.__version__, CHECKED, _module, *_GLOBAL_HOOKS)

#: Names of the kinds of hooks that a call of a module runs.
HOOK_KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")
#: A module's hooks of each kind. No Python function: a layer asks it in each forward.
hooks_of = attrgetter(*_OWN_HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a call of this module runs hooks of its own. A compiler takes it, as it does not `hooks_of`."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own)


#: Hooks of all modules, of each kind.
GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = attrgetter(*_GLOBAL_HOOKS)(_module)
