"""Hooks on modules that a plan would skip, or run once for each chunk.

A plan reads the parameters of experts, or calls the experts chunk by chunk, and `fusedmoe.pipeline` calls steps of a
gate. Hooks run when a module is called. A layer therefore calls its modules as they are, without a plan, while there
are such hooks: forward and backward hooks, pre-hooks, and hooks of all modules (`torch.nn.modules.module`).
`torch.nn.utils.prune` and the old `weight_norm` and `spectral_norm` recompute weights in forward pre-hooks.

A parametrisation (`torch.nn.utils.parametrize`) is evaluated where its tensor is read. Experts by kernels of this
library read it once for all chunks; modules that are called chunk by chunk would evaluate it in each chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fusedmoe.compat.torch import GLOBAL_HOOKS, HOOK_KINDS, has_own_hooks, hooks_of
from fusedmoe.errors import RankError


def has_hooks(module: Any) -> bool:
    """Return whether a call of a module, or of a module in it, runs hooks; or there are hooks of all modules."""
    return any(GLOBAL_HOOKS) or any(has_own_hooks(one) for one in module.modules())


def first_hook(module: Any, ignored: Collection[str] = ()) -> str | None:
    """Describe the first hook that `has_hooks` finds; None without any.

    Args:
        ignored: packages whose hooks do not count.
    """
    for kind, hooks in zip(HOOK_KINDS, GLOBAL_HOOKS, strict=True):
        for hook in hooks.values():
            if not _is_from(hook, ignored):
                return f"the global {kind} hook {_name(hook)}"
    for path, one in module.named_modules():
        if not any(hooks_of(one)):  # nearly always, and a pipeline asks for each of its modules in each forward
            continue
        for kind, hooks in zip(HOOK_KINDS, hooks_of(one), strict=True):
            for hook in hooks.values():
                if not _is_from(hook, ignored):
                    return f"the {kind} hook {_name(hook)} on {type(one).__name__}{path and f' ({path})'}"
    return None


def has_parametrisations(module: Any) -> bool:
    """Return whether a tensor of a module, or of a module in it, is parametrised."""
    return any(isinstance(one, ParametrizationList) for one in module.modules())


def must_be_called(experts: Any) -> bool:
    """Return whether experts must be called as a module, for all rows at once; else a plan may run them in chunks.

    Args:
        experts: a module, or anything with `modules` and `named_modules`. Other callables have no hooks. With
            `reads_once` a plan evaluates their parametrisations once.
    """
    if not hasattr(experts, "modules"):
        return False
    if replaced_forward(experts) is not None or has_hooks(experts):
        return True
    return not getattr(experts, "reads_once", False) and has_parametrisations(experts)


def why_called(experts: Any) -> str:
    """Describe what `must_be_called` finds."""
    return replaced_forward(experts) or first_hook(experts) or "a parametrisation of the experts"


def replaced_forward(module: Any) -> str | None:
    """Describe a `forward` of a user's own that chunks by kernels would skip; None without one.

    Either a subclass defines it whose chunks are those of its base (`reads_once`), or an instance has it, as accelerate
    sets it. Experts of other libraries are no modules here: their frameworks replace `forward` themselves.
    """
    if not isinstance(module, nn.Module):
        return None
    overrides = False
    for base in type(module).__mro__:
        if "in_chunks" in vars(base):
            if overrides and getattr(base, "reads_once", False) is True:
                return f"the forward of {type(module).__name__}, which overrides that of {base.__name__}"
            break
        overrides |= "forward" in vars(base)
    if any("forward" in vars(one) for one in module.modules()):
        return f"a forward that was set on {type(module).__name__} or a module in it"
    return None


@contextmanager
def called_for(why: str) -> Iterator[None]:
    """A context whose `RankError` also says why this rank calls modules where others may follow a plan."""
    try:
        yield
    except RankError as error:
        error.args = (f"{error}. This rank follows no plan because of {why}: register it on every rank, or remove it",)
        raise


def _original(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _is_from(hook: Any, packages: Collection[str]) -> bool:
    home = f"{getattr(_original(hook), '__module__', None) or type(hook).__module__}."
    return any(home.startswith(f"{package}.") for package in packages)


def _name(hook: Any) -> str:
    hook = _original(hook)
    return getattr(hook, "__qualname__", type(hook).__qualname__)
