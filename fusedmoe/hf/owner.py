"""The library that the forward of a module of experts is of: this one, transformers itself, or another."""

from __future__ import annotations

from functools import partial
from typing import Any

#: The name in transformers' registries.
NAME = "fusedmoe"
#: Where transformers' own forward functions of experts are: its registry's, and that of expert parallelism.
OWN = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")


def computes(experts: Any) -> bool:
    """Returns whether the forward of a module of experts is this library's."""
    return getattr(experts.config, "_experts_implementation", None) == NAME and owner(experts) in OWN


def owner(module: Any) -> str:
    """Returns the Python module that a forward function is from, under accelerate's hooks and Dynamo's wrappers."""
    forward: Any = vars(module).get("forward", type(module).forward)
    while True:
        if isinstance(forward, partial):
            # accelerate's hooks keep the forward that they call in `_old_forward`.
            hooked = _home(forward.func) == "accelerate.hooks"
            forward = module._old_forward if hooked else forward.func
        elif hasattr(forward, "_torchdynamo_orig_callable"):
            forward = forward._torchdynamo_orig_callable
        else:
            return _home(forward)


def _home(function: Any) -> str:
    # Wrapped functions say that they are from where the wrapped one is; their globals do not.
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "something unknown"))
