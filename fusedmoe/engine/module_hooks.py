"""Detection of module hooks and parametrizations that a plan would skip, or run once per chunk.

A layer with hooked modules calls them without a plan. `torch.nn.utils.prune` and the old `weight_norm` and
`spectral_norm` recompute weights in forward pre-hooks. A parametrization (`torch.nn.utils.parametrize`) is evaluated
whenever its tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fusedmoe.compat.torch import GLOBAL_HOOKS, HOOK_KINDS, has_own_hooks, hooks_of
from fusedmoe.errors import RankError, callable_name


def has_hooks(module: Any) -> bool:
    return any(GLOBAL_HOOKS) or any(has_own_hooks(one) for one in module.modules())


def find_hook(module: Any, ignored: Collection[str] = ()) -> str | None:
    """Describe the first hook outside the `ignored` packages; None if there is none."""
    for kind, hooks in zip(HOOK_KINDS, GLOBAL_HOOKS, strict=True):
        for hook in hooks.values():
            if not _is_from(hook, ignored):
                return f"the global {kind} hook {_name(hook)}"
    for path, one in module.named_modules():
        if not any(hooks_of(one)):
            continue
        for kind, hooks in zip(HOOK_KINDS, hooks_of(one), strict=True):
            for hook in hooks.values():
                if not _is_from(hook, ignored):
                    return f"the {kind} hook {_name(hook)} on {type(one).__name__}{path and f' ({path})'}"
    return None


def has_parametrisations(module: Any) -> bool:
    return any(isinstance(one, ParametrizationList) for one in module.modules())


def needs_module_call(experts: Any) -> bool:
    """Return whether experts must be called as a module for all rows at once.

    Args:
        experts: a module, or an object with `modules` and `named_modules`; other callables need no module call. With
            `reads_parameters_once`, a plan reads parameters once for all chunks, so parametrizations are allowed.
    """
    if not hasattr(experts, "modules"):
        return False
    if find_replaced_forward(experts) is not None or has_hooks(experts):
        return True
    return not getattr(experts, "reads_parameters_once", False) and has_parametrisations(experts)


def call_reason(experts: Any) -> str:
    return find_replaced_forward(experts) or find_hook(experts) or "a parametrisation of the experts"


def find_replaced_forward(module: Any) -> str | None:
    """Describe a user's own `forward` that chunked kernels would skip; None if there is none.

    Either a subclass overrides `forward` but inherits `in_chunks` (`reads_parameters_once`), or `forward` was set on an
    instance, as accelerate does. None for objects that are no modules: `ExternalExperts` of other libraries.
    """
    if not isinstance(module, nn.Module):
        return None
    overrides = False
    for base in type(module).__mro__:
        if "in_chunks" in vars(base):
            if overrides and getattr(base, "reads_parameters_once", False) is True:
                return f"the forward of {type(module).__name__}, which overrides that of {base.__name__}"
            break
        overrides |= "forward" in vars(base)
    if any("forward" in vars(one) for one in module.modules()):
        return f"a forward that was set on {type(module).__name__} or a module in it"
    return None


@contextmanager
def with_call_reason(why: str) -> Iterator[None]:
    """Context that adds to a `RankError` the reason `why` this rank runs without a plan."""
    try:
        yield
    except RankError as error:
        error.args = (f"{error}. This rank follows no plan because of {why}: register it on every rank, or remove it",)
        raise


def _unwrap(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _is_from(hook: Any, packages: Collection[str]) -> bool:
    home = f"{getattr(_unwrap(hook), '__module__', None) or type(hook).__module__}."
    return any(home.startswith(f"{package}.") for package in packages)


def _name(hook: Any) -> str:
    return callable_name(_unwrap(hook))
