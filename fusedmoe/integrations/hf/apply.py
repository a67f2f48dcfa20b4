"""Sets the experts of a model that there is already, after a look at who else may have changed them."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedmoe.errors import ConfigError
from fusedmoe.integrations.hf.expert_function import NAME, check_experts

# Where transformers' own forward functions of experts are: its registry's, and that of expert parallelism.
_OWN = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")


def apply(model: Any) -> Any:
    """Has a model of transformers compute its experts by this library; returns the model.

    Args:
        model: a `PreTrainedModel`, at any time before or between steps.
    Raises:
        ConfigError: a model without experts that transformers' registry serves; experts whose forward another library
            has replaced, which is named; experts that this library cannot compute, named.
    """
    found = {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    who = type(model).__name__
    if not found or not hasattr(model, "set_experts_implementation"):
        raise ConfigError(
            f"fusedmoe.hf.apply: {who} has no experts that transformers' registry serves: it is dense, or its experts "
            "are modules of their own. For such a model see fusedmoe.MoELayer"
        )
    for name, module in found.items():
        owner = _owner(module)
        if owner not in _OWN:
            raise ConfigError(
                f"fusedmoe.hf.apply: {owner} has replaced the forward of {name} ({type(module).__name__}), so that no "
                "experts_implementation has an effect; leave that part of it out, and apply this first"
            )
        check_experts(module)
    model.set_experts_implementation(NAME)
    return model


def _owner(module: nn.Module) -> str:
    """The module of Python that a module's forward function is from."""
    forward: Any = module.__dict__.get("forward", type(module).forward)
    forward = getattr(forward, "__func__", forward)
    # Wrapped functions say that they are from where the wrapped one is; their globals do not.
    return str(getattr(forward, "__globals__", {}).get("__name__", "something unknown"))
