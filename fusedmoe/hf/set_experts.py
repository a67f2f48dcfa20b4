"""This library for the experts of a model that there is already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fusedmoe import Schedule, Topology
from fusedmoe.compat.transformers import implementation_of, is_expert_parallel
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import registered_experts
from fusedmoe.hf.module_experts import NAME, OWN, check_experts, owner
from fusedmoe.hf.peft_adapters import refuse_split_merges, share_adapters
from fusedmoe.layers.scheduled_exchange import EXCHANGE


def apply(model: Any, schedule: str | Schedule | None = None) -> Any:
    """Sets this library for the experts of a model of transformers, after a look at who else changed them; returns it.

    Args:
        model: a `PreTrainedModel`, bare or in a wrapper (DistributedDataParallel, FSDP, PEFT, `torch.compile`), with
            accelerate's hooks (`device_map`, offloading) or without, at any time before or between steps. With expert
            parallelism and adapters of peft it is collective: adapters are then the same on all ranks, gradients too.
        schedule: what travels overlaps what is computed by it where experts are over ranks, as `MoELayer(schedule=…)`
            has it: "off", "auto", the name of a policy, or a `fusedmoe.Schedule`. With "auto" and names the first
            forward measures the machine, and keeps that on disk. None: as before. The same on all ranks; collective.
    Raises:
        ConfigError: no model at all; one without experts that transformers' registry serves; experts whose forward
            another library has replaced, which is named; experts that this library cannot compute, named; experts
            outside of any `PreTrainedModel`; an unknown schedule, or one for experts whose tokens transformers itself
            sends.
        RankError: ranks with different schedules.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"fusedmoe.hf.apply: {model!r} is no model; load it first, by from_pretrained")
    modules = registered_experts(model)
    who = type(model).__name__
    if not modules:
        raise ConfigError(
            f"fusedmoe.hf.apply: {who} has no experts that transformers' registry serves: it is dense, or its experts "
            "are modules of their own. For such a model see fusedmoe.MoELayer"
        )
    for name, module in modules.items():
        # A replaced forward never asks transformers' registry, so setting the name would change nothing.
        replaced_by = owner(module)
        if replaced_by not in OWN:
            raise ConfigError(
                f"fusedmoe.hf.apply: {replaced_by} has replaced the forward of {name} ({type(module).__name__}), so "
                "that no experts_implementation has an effect; leave that part of it out, and apply this first"
            )
        check_experts(module)
    refuse_split_merges()
    if any(is_expert_parallel(module) for module in modules.values()):
        _share_adapters(model)
    for owner_of_experts in _outermost(model):
        owner_of_experts.set_experts_implementation(NAME)
    for name, module in modules.items():
        chosen = implementation_of(module)
        # A model that does not pass the choice on to its parts, or a module outside of any model.
        if chosen != NAME:
            raise ConfigError(
                f"fusedmoe.hf.apply: {name or 'it'} ({type(module).__name__}) keeps experts_implementation={chosen!r}, "
                f"which only the PreTrainedModel that it belongs to can set; apply this to that model, not to {who}"
            )
    if schedule is not None:
        _set_schedule(modules, schedule)
    return model


def _share_adapters(model: Any) -> None:
    """Has adapters in a model over ranks be the same on all of them."""
    if not any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        return
    config: Any = next(_outermost(model)).config.distributed_config
    if config.tp_size > 1 or config.pp_size > 1:
        raise ConfigError(
            f"fusedmoe.hf.apply: {type(model).__name__} has adapters, and tp_size={config.tp_size}, "
            "with which gradients of adapters are not the mean over all ranks; use fsdp_size and ep_size alone"
        )
    share_adapters(model, Topology.from_group(torch.distributed.group.WORLD).world)


def _set_schedule(modules: dict[str, Any], schedule: str | Schedule) -> None:
    if isinstance(schedule, str):
        Schedule.named(schedule)  # a wrong name is refused where nothing travels, too
    for name, module in modules.items():
        exchange = getattr(module, EXCHANGE, None)
        if exchange is not None:
            exchange.set_schedule(schedule)
        elif is_expert_parallel(module) and schedule != "off":
            raise ConfigError(
                f"fusedmoe.hf.apply: transformers itself sends the tokens of {name} ({type(module).__name__}), and no "
                f"schedule has an effect; load the model with DistributedConfig(…, ep_implementation={NAME!r})"
            )


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields models of transformers with experts that are in no other such model."""
    if isinstance(module, PreTrainedModel):
        if registered_experts(module):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)
