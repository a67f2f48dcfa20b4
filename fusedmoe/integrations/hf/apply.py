"""Sets the experts of a model that there is already, after a look at who else may have changed them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fusedmoe.errors import ConfigError
from fusedmoe.integrations.hf.expert_function import NAME, check_experts, registered_experts

# Where transformers' own forward functions of experts are: its registry's, and that of expert parallelism.
_OWN = ("transformers.integrations.moe", "transformers.distributed.expert_parallel")


def apply(model: Any) -> Any:
    """Has a model of transformers compute its experts by this library; returns the model.

    Args:
        model: a `PreTrainedModel`, bare or in a wrapper (DistributedDataParallel, FSDP, PEFT, `torch.compile`), with
            accelerate's hooks (`device_map`, offloading) or without, at any time before or between steps.
    Raises:
        ConfigError: a model without experts that transformers' registry serves; experts whose forward another library
            has replaced, which is named; experts that this library cannot compute, named; experts outside of any
            `PreTrainedModel`.
    """
    found = registered_experts(model)
    who = type(model).__name__
    if not found:
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
    for each in _outermost(model):
        each.set_experts_implementation(NAME)
    for name, module in found.items():
        chosen = getattr(module.config, "_experts_implementation", None)
        if chosen != NAME:  # a model that does not pass it on, or no model at all
            raise ConfigError(
                f"fusedmoe.hf.apply: {name or 'it'} ({type(module).__name__}) keeps experts_implementation={chosen!r}, "
                f"which only the PreTrainedModel that it belongs to can set; apply this to that model, not to {who}"
            )
    return model


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Models of transformers with experts that are in no other such model."""
    if isinstance(module, PreTrainedModel):
        if registered_experts(module):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _owner(module: Any) -> str:
    """The module of Python that a module's forward function is from, under accelerate's hooks and Dynamo's wrappers."""
    forward: Any = vars(module).get("forward", type(module).forward)
    while True:
        if isinstance(forward, partial):
            hooked = _home(forward.func) == "accelerate.hooks"  # its hooks call the forward that they have kept
            forward = module._old_forward if hooked else forward.func
        elif hasattr(forward, "_torchdynamo_orig_callable"):
            forward = forward._torchdynamo_orig_callable
        else:
            return _home(forward)


def _home(function: Any) -> str:
    # Wrapped functions say that they are from where the wrapped one is; their globals do not.
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "something unknown"))
